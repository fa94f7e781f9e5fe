"""Whatever interrupts a save, the newest checkpoint is the old or the new, whole.

Each test runs one life of a job (start, save, prune) and interrupts it at its n-th
file operation, for every n until it gets through: the operation fails, the process
is killed, or the power goes and only what was forced to the disk is left.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.memory import Memory, start_checksums
from elasticrun.checkpoint.files.recorded import FileRecord
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.files.streams import ChecksumWriter
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.support.power import Recorder, Tree, lay_out

REPOSITORY = Path(durable.__file__).parents[3]
OPERATIONS = ("open", "fsync", "ftruncate", "mkdir", "unlink", "rmdir", "replace")


# One life of a job


def states(number: int) -> dict[str, bytes]:
    """Return content that tells which save it is from; `model` exceeds a buffer."""
    return {"model": b"parameters %d " % number * 2000, "small": b"%d" % number}


def start(directory: Path) -> tuple[CheckpointStore, int, Checkpoint | None]:
    store = CheckpointStore(directory, job="digits", keep=2)
    store.acquire(timeout=0)
    try:
        generation = store.next_generation()
        store.sweep()
        return store, generation, store.find_newest()
    except BaseException:
        store.release()
        raise


def save(store: CheckpointStore, *, generation: int, carry: Checkpoint | None) -> None:
    """Save as a job does: `model` from memory, the others by writing themselves."""
    draft = store.begin(store.next_number())
    contents = states(draft.number)
    model = Memory().capture(lambda file: file.write(contents["model"]))
    start_checksums([model])
    try:
        records = [
            draft.write_captured("model", model),
            draft.write("small", lambda file: file.write(contents["small"])),
        ]
        if carry is not None and carry.has("carried"):
            records.append(draft.copy(carry, "carried"))
        else:
            records.append(draft.write("carried", lambda file: file.write(b"carried")))
        draft.commit(manifest(draft.number, generation, *records))
    except OSError:
        draft.abandon()
        raise
    store.prune()


def live(directory: Path) -> None:
    store, generation, newest = start(directory)
    try:
        save(store, generation=generation, carry=newest)
    finally:
        store.release()


def manifest(number: int, generation: int, *records: FileRecord) -> Manifest:
    return Manifest(
        job="digits",
        number=number,
        generation=generation,
        world_size=1,
        position={"index": number},
        time=0.0,
        torch_version="2.13.0",
        elasticrun_version="0.1.0",
        files=records,
    )


def make_old(directory: Path) -> None:
    """Leave checkpoints 2 and 3, so that the next save makes 4 and prunes 2."""
    for _ in range(3):
        live(directory)


def assert_whole(checkpoint: Checkpoint) -> None:
    expected = states(checkpoint.number) | {"carried": b"carried"}
    assert set(checkpoint.names()) == set(expected)
    for name, data in expected.items():
        with checkpoint.open(name) as file:
            assert file.read() == data


def assert_survived(directory: Path, *, newest: tuple[int, ...] = (3, 4)) -> int:
    """Start the job again, see the old or the new checkpoint, save; return which.

    A checkpoint found damaged would warn, and so fail: a crash leaves none.
    """
    store, generation, found = start(directory)
    try:
        assert found is not None
        assert found.number in newest
        assert_whole(found)
        assert generation > found.manifest.generation
        save(store, generation=generation, carry=found)
        again = store.find_newest()
        assert again is not None
        assert again.number > found.number
        assert_whole(again)
    finally:
        store.release()
    left = sorted(path.name for path in directory.iterdir())
    assert left == [
        *(path.name for path in (found.path, again.path)),
        "generation",
        "lock",
    ]
    return found.number


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


@pytest.mark.parametrize("stays_broken", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_save_leaves_the_last_one(
    tmp_path: Path, code: int, stays_broken: bool
) -> None:
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


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_start_can_be_repeated(tmp_path: Path, code: int) -> None:
    make_old(tmp_path / "old")
    for position in itertools.count(1):
        directory = tmp_path / str(position)
        shutil.copytree(tmp_path / "old", directory)
        failure = FailFrom(position, code, stays_broken=True)
        with before_each_operation(failure), suppress(OSError, CheckpointError):
            start(directory)[0].release()
        assert_survived(directory, newest=(3,))
        if not failure.has_failed:
            break
    assert position > 5


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
def test_killed_job_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    make_old(tmp_path / "old")
    statuses = run_killed_lives(tmp_path)
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)
    assert len(statuses) > 30
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
        num_checkpoints = len(list(store.directory.glob("checkpoint-*")))
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


def run_killed_lives(directory: Path) -> list[int]:
    """Copy `old` to 1, 2, ..., n and kill a life in each at that operation."""
    result = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    statuses: list[int] = json.loads(result.stdout)
    return statuses


def main(directory: Path) -> None:
    """Fork a life for each operation; in a process of one thread, so that it may."""
    statuses = []
    for position in itertools.count(1):
        shutil.copytree(directory / "old", directory / str(position))
        process = os.fork()
        if process == 0:
            with before_each_operation(kill_at(position)):
                live(directory / str(position))
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        if statuses[-1] != -signal.SIGKILL:
            break
    print(json.dumps(statuses))


# Power failures


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


def write_without_renaming(path: Path, data: bytes) -> None:
    """What a commit must not be: a manifest that is there before it is whole."""
    with durable.open(path, "wb") as file:  # type: ignore[attr-defined]
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    durable.fsync_directory(path.parent)


def write_without_syncing(path: Path, data: bytes) -> None:
    """What a commit must not be: a name that is there before its content."""
    with durable.open(path.with_name("tmp"), "wb") as file:  # type: ignore[attr-defined]
        file.write(data)
    os.replace(path.with_name("tmp"), path)
    durable.fsync_directory(path.parent)


def write_file_without_syncing(
    path: Path, write: Callable[[Any], object]
) -> FileRecord:
    """What a commit must not be: states that come to the disk after the manifest."""
    with durable.open(path, "xb") as file:  # type: ignore[attr-defined]
        writer = ChecksumWriter(file)
        write(writer)
    return FileRecord(path.name, writer.size, writer.crc32)


def write_blocks_without_syncing(path: Path, blocks: Any, *, checksum: Any) -> Any:
    """The same for states that come from memory."""
    with durable.open(path, "xb") as file:  # type: ignore[attr-defined]
        size = sum(file.write(block) for block in blocks)
    return FileRecord(path.name, size, checksum())


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


def test_commit_forces_all_before_the_manifest_has_its_name(tmp_path: Path) -> None:
    store, _, _ = start(tmp_path)
    draft = store.begin(1)
    record = draft.write("model", lambda file: file.write(b"parameters"))
    done: list[str] = []
    with before_each_operation(done.append):
        draft.commit(manifest(1, 0, record))
    store.release()
    fsync_directory = ["open", "fsync"]
    assert done == [
        *fsync_directory,
        *("create", "write", "fsync", "replace"),
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
            store.directory / "checkpoint-00000002", first="manifest.json"
        )
    store.release()
    assert done[:3] == ["unlink", "open", "fsync"]
    assert done.count("unlink") == 4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
