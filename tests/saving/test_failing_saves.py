"""What becomes of a save that fails, in flight or not."""

from __future__ import annotations

import errno
import os
import tarfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from elasticrun import (
    CheckpointError,
    CheckpointWarning,
    Variables,
    current_job,
    remaining_epochs_until,
    request_checkpoint,
    save_all_states,
)
from tests.support.full_disk import fail_for_space, limited_files, no_space
from tests.support.generations import run_once
from tests.support.held import WRITER, Held
from tests.support.in_flight import (
    Text,
    batches,
    committed,
    is_writing,
    list_paths,
)
from tests.support.stage import wait_until


def test_a_disk_that_fails_is_told_at_the_next_boundary_and_counted(
    tmp_path: Path, held: Held
) -> None:
    def script() -> None:
        told = 0
        save_all_states()
        for _ in (loader := batches(50)):
            if loader.batch_index in (0, 20):
                held.hold_again()
                held.error = OSError(errno.EIO, os.strerror(errno.EIO))
                request_checkpoint()
            if loader.batch_index in (2, 22):
                held.wait_for_writer()
                held.let_go()
                wait_until(lambda: not is_writing())
                assert current_job().num_failed_saves == told
                told += 1
            if loader.batch_index in (3, 23):
                assert current_job().num_failed_saves == told

    with pytest.warns(CheckpointWarning) as caught:
        run_once(script, tmp_path)
    texts = [str(warning.message) for warning in caught]
    assert [text.partition(":")[0] for text in texts] == [
        "checkpoint 2 was not saved",
        "checkpoint 3 was not saved",
    ]
    assert "Input/output error" in texts[0]
    assert f"The newest checkpoint is {tmp_path}/checkpoint-00000001" in texts[0]
    assert committed(tmp_path) == [1]


def test_a_failure_is_told_at_the_end_if_no_boundary_comes(
    tmp_path: Path, held: Held
) -> None:
    held.error = no_space()
    held.let_go()

    def script() -> None:
        for _ in (loader := batches(2)):
            if loader.batch_index == 1:
                request_checkpoint()

    with pytest.warns(CheckpointWarning, match="checkpoint 1 was not saved.*No space"):
        run_once(script, tmp_path)


def test_the_end_of_the_epochs_is_saved_again_if_that_failed(
    tmp_path: Path, held: Held
) -> None:
    """Else a finished job would train its last epoch again when it is started again."""
    held.error = no_space()
    held.let_go()

    def script() -> int:
        loader = batches(2)
        return sum(len(list(loader)) for _ in remaining_epochs_until(2))

    with pytest.warns(CheckpointWarning, match="was not saved.*No space"):
        assert run_once(script, tmp_path, save_every="epoch") == 4
    assert committed(tmp_path) == [3]
    assert run_once(script, tmp_path) == 0


def test_the_end_of_the_epochs_is_saved_once_if_the_save_before_it_failed(
    tmp_path: Path, held: Held
) -> None:
    """Replicas that settled that one at a boundary would not come to another save."""

    class Mending(Text):
        def sync(self) -> None:
            held.error = None

    def script() -> None:
        Mending()
        loader = batches(2)
        for epoch in remaining_epochs_until(2):
            for _ in loader:
                if (epoch, loader.batch_index) == (1, 0):
                    held.wait_for_writer()
                    held.error = no_space()
                    held.let_go_when_awaited()

    with pytest.warns(CheckpointWarning, match="checkpoint 1 was not saved.*No space"):
        run_once(script, tmp_path, save_every="epoch")
    assert committed(tmp_path) == [2]


@pytest.mark.parametrize("at", ["boundary", "end"])
def test_an_error_that_no_disk_gives_is_raised(
    tmp_path: Path, held: Held, at: str
) -> None:
    held.error = ZeroDivisionError("in the writer")
    held.let_go()

    def script() -> None:
        for _ in (loader := batches(100)):
            if loader.batch_index == 0:
                request_checkpoint()
            if loader.batch_index == 1:
                wait_until(lambda: not is_writing())
                if at == "end":
                    break
            assert loader.batch_index < 2

    with pytest.raises(ZeroDivisionError, match="in the writer"):
        run_once(script, tmp_path)
    assert committed(tmp_path) == []


def test_a_mistake_in_a_state_is_raised_at_the_boundary(tmp_path: Path) -> None:
    class Failing(Text):
        def save(self, fileobj: BinaryIO) -> None:
            raise KeyError(self.text)

    def script() -> None:
        text = Failing()
        for _ in (loader := batches(3)):
            text.text = f"batch {loader.batch_index}"
            request_checkpoint()

    with pytest.raises(KeyError, match="batch 0"):
        run_once(script, tmp_path)
    assert list_paths(tmp_path) == []


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("at", ["sync", "save", "after_save"])
def test_a_save_within_a_save_is_refused(
    tmp_path: Path, at: str, async_save: bool
) -> None:
    """The inner one would capture into the memory that the outer one fills."""

    def save_too(*_: Any) -> None:
        save_all_states()

    def script() -> None:
        setattr(Text(), at, save_too)
        save_all_states()

    with pytest.raises(CheckpointError, match=r"while it runs in one.*request_"):
        run_once(script, tmp_path, async_save=async_save)
    assert len(committed(tmp_path)) == (at == "after_save")


def test_an_oserror_of_a_state_leaves_the_last_one(tmp_path: Path) -> None:
    class Failing(Text):
        def save(self, fileobj: BinaryIO) -> None:
            raise FileNotFoundError("a table of its own")

    def script() -> str:
        save_all_states()
        Failing()
        for _ in (loader := batches(3)):
            if loader.batch_index == 0:
                request_checkpoint()
        return "finished"

    with pytest.warns(
        CheckpointWarning,
        match=r"2 was not saved: FileNotFoundError: a table of its own\. The",
    ):
        assert run_once(script, tmp_path) == "finished"
    assert committed(tmp_path) == [1]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_stream_that_cannot_seek_is_no_failing_disk(
    tmp_path: Path, async_save: bool
) -> None:
    class Archive(Text):
        def save(self, fileobj: BinaryIO) -> None:
            tarfile.open(fileobj=fileobj, mode="w").close()

    def script() -> None:
        Archive()
        save_all_states()

    with pytest.raises(TypeError, match="'text'.*Archive.*seek.*an io.BytesIO first"):
        run_once(script, tmp_path, async_save=async_save)
    assert list_paths(tmp_path) == []


@pytest.mark.parametrize("async_save", [True, False])
def test_an_oserror_without_a_text_is_one(tmp_path: Path, async_save: bool) -> None:
    """As `future.result(timeout=...)` raises it."""

    class Slow(Text):
        def save(self, fileobj: BinaryIO) -> None:
            if self.text == "slow":
                raise TimeoutError
            super().save(fileobj)

    def script() -> None:
        text, best = Slow(), Variables(value=7)
        save_all_states()
        text.text, best.value = "slow", 8
        save_all_states()

    with pytest.warns(CheckpointWarning, match=r"2 was not saved: TimeoutError\. The"):
        run_once(script, tmp_path, async_save=async_save)
    assert committed(tmp_path) == [1]
    assert set(os.listdir(tmp_path / "checkpoint-00000001")) >= {"text", "variables"}


def test_old_ones_that_cannot_be_removed_are_warned_of_at_a_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(f"{threading.current_thread().name} may not")

    def script() -> None:
        save_all_states()
        monkeypatch.setattr("elasticrun.checkpoint.files.durable.remove_tree", refuse)
        for _ in (loader := batches(4)):
            if loader.batch_index == 0:
                request_checkpoint()
            if loader.batch_index == 1:
                wait_until(lambda: not is_writing())

    with pytest.warns(
        CheckpointWarning, match=f"00000001 could not .*{WRITER} may not"
    ):
        run_once(script, tmp_path, keep=1)
    assert committed(tmp_path) == [1, 2]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_full_disk_leaves_no_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    def script() -> None:
        save_all_states()
        before = sorted(os.listdir(tmp_path))
        monkeypatch.setattr(os, "mkdir", fail_for_space)
        with pytest.warns(CheckpointWarning, match="2 was not saved.*No space left"):
            save_all_states()
        assert sorted(os.listdir(tmp_path)) == before
        monkeypatch.undo()
        with limited_files(0), pytest.warns(CheckpointWarning, match="3 was not saved"):
            save_all_states()
        assert sorted(os.listdir(tmp_path)) == before

    run_once(script, tmp_path, async_save=is_async)
