"""Whatever interrupts a save, the newest checkpoint is the old or the new, whole.

Each test runs one life of a job (start, save, prune) and interrupts it at its n-th
file operation, for every n until it gets through: the operation fails, or the process
is killed.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import StoreUnreachableError
from elasticrun.checkpoint.storage import local
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.crash.lives import (
    REPOSITORY,
    assert_survived,
    assert_whole,
    live,
    make_old,
    save,
    start,
)
from tests.support.stores import manifest

OPERATIONS = ("open", "fsync", "ftruncate", "mkdir", "unlink", "rmdir", "replace")


# A file layer that is interrupted at the n-th operation


@contextmanager
def before_each_operation(act: Callable[[str], None]) -> Iterator[None]:
    """Call `act` with the name of each operation that changes files, before it.

    A write is interrupted half-way. What `act` itself does to files is not noticed.
    """
    is_acting = False

    def notice(name: str) -> None:
        nonlocal is_acting
        if not is_acting:
            is_acting = True
            try:
                act(name)
            finally:
                is_acting = False

    def noticed(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def operation(*arguments: Any, **keywords: Any) -> Any:
            notice(name)
            return original(*arguments, **keywords)

        return operation

    class NoticedFile(io.FileIO):
        def write(self, data: Any) -> int:
            half = len(data) // 2
            super().write(memoryview(data)[:half])
            notice("write")
            return half + super().write(memoryview(data)[half:])

    def open_noticed(path: Path, mode: str = "r", **keywords: Any) -> Any:
        if mode == "rb":
            return builtins.open(path, mode, **keywords)
        notice("create")
        return io.BufferedWriter(NoticedFile(path, mode.replace("b", "")))

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(durable, "open", open_noticed, create=True)
        )
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(os, name, noticed(name)))
        yield


class FailFrom:
    """Fail the n-th operation, and all after it if the disk stays broken."""

    def __init__(self, position: int, code: int, *, stays_broken: bool) -> None:
        self.position = position
        self.code = code
        self.stays_broken = stays_broken
        self.num_operations = 0

    def __call__(self, operation: str) -> None:
        self.num_operations += 1
        is_past = self.num_operations > self.position
        if self.num_operations == self.position or (is_past and self.stays_broken):
            raise OSError(self.code, os.strerror(self.code))

    @property
    def has_failed(self) -> bool:
        return self.num_operations >= self.position


def kill_at(position: int) -> Callable[[str], None]:
    counter = itertools.count(1)

    def act(operation: str) -> None:
        if next(counter) == position:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


# Errors


@pytest.mark.parametrize(
    ("code", "stays_broken"), [(errno.EIO, False), (errno.ENOSPC, True)]
)
def test_failed_save_leaves_the_last_one(
    tmp_path: Path, code: int, stays_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_PAUSES", (0.0, 0.0))
    make_old(tmp_path / "old")
    found = []
    for position in itertools.count(1):
        directory = tmp_path / str(position)
        shutil.copytree(tmp_path / "old", directory)
        failure = FailFrom(position, code, stays_broken=stays_broken)
        save_with(failure, directory)
        found.append(assert_survived(directory, newest=(3, 4, 5)))
        if not failure.has_failed:
            break
    assert len(found) > 20
    assert found[-1] == 5  # the job itself went on and saved again


def save_with(failure: FailFrom, directory: Path) -> None:
    """Save once with the failure and once, by the same job, after it."""
    store, generation, newest = start(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # what prune cannot remove
        with before_each_operation(failure), suppress(OSError):
            save(store, generation=generation, carry=newest)
    found = store.find_newest()
    assert found is not None
    assert found.number in (3, 4)
    assert_whole(found)
    save(store, generation=generation, carry=found)
    store.release()


def test_failed_start_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_PAUSES", (0.0, 0.0))
    make_old(tmp_path / "old")
    for position in itertools.count(1):
        directory = tmp_path / str(position)
        shutil.copytree(tmp_path / "old", directory)
        failure = FailFrom(position, errno.EIO, stays_broken=True)
        with before_each_operation(failure), suppress(OSError, CheckpointError):
            start(directory)[0].release()
        assert_survived(directory, newest=(3,))
        if not failure.has_failed:
            break
    assert position > 5


READING = ("open", "stat", "listdir")
CODES = [getattr(errno, f"E{code}") for code in
         ("IO", "STALE", "MFILE", "ACCES", "NOMEM", "INTR", "TIMEDOUT")]  # fmt: skip


@pytest.mark.parametrize(("code", "num_failures"), [*((c, 1) for c in CODES), (5, 99)])
def test_a_start_that_cannot_read_is_no_start_with_something_older(
    tmp_path: Path, code: int, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that failed once is taken again; what cannot be read is not damaged."""
    monkeypatch.setattr(local, "_PAUSES", (0.0, 0.0))
    make_old(tmp_path)
    num_refused = 0
    for position in itertools.count(1):
        store = CheckpointStore(tmp_path, job="digits")
        failing = range(position, position + num_failures)
        with before_each_reading(tmp_path, failing, code) as counter:
            try:
                found = store.find_newest()
            except StoreUnreachableError:
                num_refused += 1
            else:
                assert found is not None
                assert found.number == 3
        if next(counter) <= position:
            break
    assert position > 5
    assert num_refused == (position - 1 if num_failures > 1 else 0)


@contextmanager
def before_each_reading(
    directory: Path, failing: range, code: int
) -> Iterator[Iterator[int]]:
    """Let some of the looks at files and folders of a directory fail."""
    counter = itertools.count(1)

    def noticed(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def look(path: Any, *arguments: Any, **keywords: Any) -> Any:
            is_inside = not isinstance(path, int) and str(path).startswith(
                str(directory)
            )
            if is_inside and next(counter) in failing:
                raise OSError(code, os.strerror(code), path)
            return original(path, *arguments, **keywords)

        return look

    with ExitStack() as stack:
        for name in READING:
            stack.enter_context(mock.patch.object(os, name, noticed(name)))
        yield counter


def test_short_writes_are_completed(memory: Path) -> None:
    class ShortFile(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[: len(data) // 2 or 1])

    def open_short(path: Path, mode: str = "r", **keywords: Any) -> Any:
        if mode == "rb":
            return builtins.open(path, mode, **keywords)
        return io.BufferedWriter(ShortFile(path, mode.replace("b", "")))

    with mock.patch.object(durable, "open", open_short, create=True):
        make_old(memory / "job")
    assert_survived(memory / "job", newest=(3,))


# Kills


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forced", "unforced"])
def test_killed_job_leaves_the_old_or_the_new(tmp_path: Path, how: str) -> None:
    make_old(tmp_path / "old")
    statuses = run_killed_lives(tmp_path, how)
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)
    assert len(statuses) > 25
    found = [assert_survived(tmp_path / str(n + 1)) for n in range(len(statuses))]
    assert found == sorted(found)
    assert set(found) == {3, 4}


@pytest.mark.slow
def test_killed_first_save_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    statuses = run_killed_lives(tmp_path)
    for position in range(1, len(statuses) + 1):
        store, _, found = start(tmp_path / str(position))
        assert found is None or found.number == 1
        num_checkpoints = len(list(store.place.glob("checkpoint-*")))
        assert num_checkpoints == (found is not None)
        store.release()
    assert found is not None


@pytest.mark.slow
def test_generations_never_repeat(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    store, first, _ = start(tmp_path / "old")
    store.release()
    statuses = run_killed_lives(tmp_path)
    found = []
    for position in range(1, len(statuses) + 1):
        store, generation, _ = start(tmp_path / str(position))
        found.append(generation)
        store.release()
    assert first == 0
    assert found == sorted(found)
    assert set(found) == {1, 2}


def run_killed_lives(directory: Path, how: str = "forced") -> list[int]:
    """Copy `old` to 1, 2, ..., n and kill a life in each at that operation."""
    result = subprocess.run(
        [sys.executable, __file__, str(directory), how],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    statuses: list[int] = json.loads(result.stdout)
    return statuses


def main(directory: Path, how: str) -> None:
    """Fork a life for each operation; in a process of one thread, so that it may."""
    statuses = []
    for position in itertools.count(1):
        shutil.copytree(directory / "old", directory / str(position))
        process = os.fork()
        if process == 0:
            with before_each_operation(kill_at(position)):
                live(directory / str(position), is_forced=how == "forced")
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        if statuses[-1] != -signal.SIGKILL:
            break
    print(json.dumps(statuses))


# The order of what is forced to the disk


def test_commit_forces_all_before_the_manifest_has_its_name(tmp_path: Path) -> None:
    store, _, _ = start(tmp_path)
    draft = store.begin(1)
    record = draft.write("model", lambda file: file.write(b"parameters"))
    done: list[str] = []
    with before_each_operation(done.append):
        draft.commit(manifest(1, record))
    store.release()
    fsync_directory = ["open", "fsync"]
    assert done == [
        *fsync_directory,
        *("unlink", "create", "write", "fsync", "replace"),
        *fsync_directory,
        *fsync_directory,
        "unlink",
    ]


def test_manifest_is_gone_for_good_before_the_rest(tmp_path: Path) -> None:
    make_old(tmp_path)
    store, _, _ = start(tmp_path)
    done: list[str] = []
    with before_each_operation(done.append):
        durable.remove_tree(
            store.place / "checkpoint-00000002",
            first="manifest.json",
            last="manifest.json.draft",
        )
    store.release()
    assert done[:3] == ["replace", "open", "fsync"]
    assert done[3:8] == ["unlink", "unlink", "unlink", "open", "fsync"]
    assert done[-2:] == ["unlink", "rmdir"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
