"""Whatever a power failure leaves of a save, the newest checkpoint is whole.

The power goes at any file operation, and only what was forced to the disk is surely
left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import ChecksumWriter, FileRecord
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.crash.lives import (
    assert_survived,
    assert_whole,
    live,
    make_old,
    save,
    start,
)
from tests.support.power import Recorder, Tree, lay_out


@dataclass
class PowerCut:
    """What a power cut may leave, and the checkpoint that must be found in it."""

    operation: str
    tree: Tree
    expected: tuple[int, ...]


def cut_power_during(
    directory: Path, act: Callable[[Callable[[], None]], None]
) -> list[PowerCut]:
    """Return the states that power cuts may leave while `act` makes 4 from 3.

    Args:
        act: Calls what it is given when the commit has returned.
    """
    cuts: list[PowerCut] = []
    recorder = Recorder(directory)
    expected: tuple[int, ...] = (3,)

    def note(operation: str, tree: Tree) -> None:
        nonlocal expected
        if operation == "rename" and "checkpoint-00000004" in tree:
            expected = expected if 4 in expected else (3, 4)
        cuts.append(PowerCut(operation, tree, expected))

    def note_committed() -> None:
        nonlocal expected
        expected = (4,)
        recorder.forget()

    recorder.on_state = note
    with recorder.watch():
        act(note_committed)
    return cuts


def live_and_tell(directory: Path, committed: Callable[[], None]) -> None:
    """Live once; say when the checkpoint is committed, before old ones are removed."""
    store, generation, newest = start(directory)
    prune = store.prune

    def tell_and_prune() -> None:
        committed()
        prune()

    with mock.patch.object(store, "prune", tell_and_prune):
        save(store, generation=generation, carry=newest)
    store.release()


def broken(cuts: list[PowerCut], directory: Path) -> Iterator[str]:
    """Yield what is wrong after those power cuts from which a job does not recover."""
    for number, cut in enumerate(cuts):
        target = directory / f"left-{number}"
        lay_out(cut.tree, target)
        try:
            assert_survived(target, newest=cut.expected)
        except (AssertionError, CheckpointWarning, CheckpointError, OSError) as error:
            yield f"after {cut.operation}: {error} in {cut.tree}"
        shutil.rmtree(target)


def test_power_failure_leaves_the_old_or_the_new(memory: Path) -> None:
    make_old(memory / "job")
    cuts = cut_power_during(
        memory / "job", lambda committed: live_and_tell(memory / "job", committed)
    )
    assert len(cuts) > 50
    assert {cut.expected for cut in cuts} == {(3,), (3, 4), (4,)}
    assert list(broken(cuts, memory)) == []


def test_power_failure_in_the_first_life_leaves_nothing_or_the_new(
    memory: Path,
) -> None:
    states: list[Tree] = []
    (memory / "job").mkdir()
    recorder = Recorder(memory / "job")
    recorder.on_state = lambda operation, tree: states.append(tree)
    with recorder.watch():
        live(memory / "job")
    found = set()
    for number, tree in enumerate(states):
        lay_out(tree, memory / str(number))
        store, _, newest = start(memory / str(number))
        if newest is not None:
            assert newest.number == 1
            assert_whole(newest)
        found.add(newest is not None)
        store.release()
    assert found == {False, True}
    live(memory / "job")


def without_syncing_directories(path: Path) -> None:
    """What a commit must not be: names that come to the disk whenever they like."""


def write_without_renaming(path: Path, data: bytes, **_: object) -> None:
    """What a commit must not be: a manifest that is there before it is whole."""
    with durable.open(path, "wb") as file:  # type: ignore[attr-defined]
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    durable.fsync_directory(path.parent)


def write_without_syncing(path: Path, data: bytes, **_: object) -> None:
    """What a commit must not be: a name that is there before its content."""
    with durable.open(path.with_name("tmp"), "wb") as file:  # type: ignore[attr-defined]
        file.write(data)
    os.replace(path.with_name("tmp"), path)
    durable.fsync_directory(path.parent)


def write_file_without_syncing(
    path: Path, write: Callable[[Any], object], **_: object
) -> FileRecord:
    """What a commit must not be: states that come to the disk after the manifest."""
    with durable.open(path, "xb") as file:  # type: ignore[attr-defined]
        writer = ChecksumWriter(file.write)
        write(writer)
    return FileRecord(path.name, writer.size, writer.crc32)


def write_blocks_without_syncing(path: Path, blocks: Any, **_: object) -> FileRecord:
    """The same for states that come from memory."""
    with durable.open(path, "xb") as file:  # type: ignore[attr-defined]
        writer = ChecksumWriter(file.write)
        writer.writelines(blocks)
    return FileRecord(path.name, writer.size, writer.crc32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("fsync_directory", without_syncing_directories),
        ("write_atomically", write_without_renaming),
        ("write_atomically", write_without_syncing),
        ("write_file", write_file_without_syncing),
        ("write_blocks", write_blocks_without_syncing),
    ],
)
def test_power_failures_would_show_a_mistake(
    memory: Path, name: str, mistake: Callable[..., Any]
) -> None:
    make_old(memory / "job")

    def act(committed: Callable[[], None]) -> None:
        with mock.patch.object(durable, name, mistake):
            live_and_tell(memory / "job", committed)

    cuts = cut_power_during(memory / "job", act)
    assert next(broken(cuts[::-1], memory), None) is not None


@pytest.mark.parametrize("old", [None, b"old" * 100])
def test_power_failure_leaves_the_old_or_the_new_file(
    memory: Path, old: bytes | None
) -> None:
    """The same for what replaces a single file, as `atomic_save` does."""
    directory, new = memory / "files", b"new" * 5000
    directory.mkdir()
    if old is not None:
        (directory / "model.pt").write_bytes(old)
    states: list[Tree] = []
    recorder = Recorder(directory)
    recorder.on_state = lambda operation, tree: states.append(tree)
    with recorder.watch():
        replace_file(directory / "model.pt", lambda file: file.write(new))
    assert {tree.get("model.pt") for tree in states} == {old, new}
    assert {tree.get("model.pt") for tree in recorder.states()} == {new}
    assert any(tree.keys() - {"model.pt"} for tree in states)  # What was left ...
    for number, tree in enumerate(states):
        lay_out(tree, memory / str(number))
        path = memory / str(number) / "model.pt"
        replace_file(path, lambda file: file.write(b"next"))
        assert path.read_bytes() == b"next"
        assert os.listdir(path.parent) == ["model.pt"]  # ... is cleared away.


def test_power_failure_leaves_a_version_or_none(memory: Path) -> None:
    """The same for an `AtomicDirectory`, whose files others write."""
    from elasticrun import AtomicDirectory  # Forking tests need no torch in here.

    directory = AtomicDirectory(memory / "exports", keep=1)
    texts = [b"old" * 10, b"new" * 10]
    with directory.prepare() as version:
        (version / "text").write_bytes(texts[0])
    states: list[Tree] = []
    recorder = Recorder(directory.directory)
    recorder.on_state = lambda operation, tree: states.append(tree)
    with (
        recorder.watch(),
        directory.prepare() as version,
        recorder.open(version / "text", "xb") as file,
    ):
        file.write(texts[1])
    states += recorder.states()
    found = []
    for number, tree in enumerate(states):
        lay_out(tree, memory / str(number))
        left = AtomicDirectory(memory / str(number))
        newest = left.latest()
        assert newest is not None
        found.append(texts.index((newest / "text").read_bytes()))
        with left.prepare() as version:
            (version / "text").write_bytes(b"next")
        assert left.latest() == version.path
    assert set(found) == {0, 1}
    assert found[-1] == 1
