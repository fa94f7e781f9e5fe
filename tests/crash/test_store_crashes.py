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
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elasticrun.checkpoint import files
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files import FileRecord
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning

REPOSITORY = Path(files.__file__).parents[2]
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
    draft = store.begin(store.next_number())
    try:
        records = [
            draft.write(name, lambda file, data=data: file.write(data))  # type: ignore[misc]
            for name, data in states(draft.number).items()
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
    assert found is not None
    assert found.number in newest
    assert_whole(found)
    assert generation > found.manifest.generation
    save(store, generation=generation, carry=found)
    again = store.find_newest()
    assert again is not None
    assert again.number > found.number
    assert_whole(again)
    left = sorted(path.name for path in directory.iterdir())
    assert left == [
        *(path.name for path in (found.path, again.path)),
        "generation",
        "lock",
    ]
    store.release()
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
            return builtins.open(path, mode)
        notice("create")
        return io.BufferedWriter(NoticedFile(path, mode.replace("b", "")))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(files, "open", open_noticed, create=True))
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


# Kills


def test_killed_job_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    make_old(tmp_path / "old")
    statuses = run_killed_lives(tmp_path)
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)
    assert len(statuses) > 30
    found = [assert_survived(tmp_path / str(n + 1)) for n in range(len(statuses))]
    assert found == sorted(found)
    assert set(found) == {3, 4}


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


class Disk:
    """What a power failure would leave: only what fsync has forced to the disk.

    Tracked by inode, and each is held open so that its number is not used again.
    """

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._held: list[int] = []

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    @contextmanager
    def watch(self) -> Iterator[None]:
        fsync = os.fsync

        def fsync_and_note(descriptor: int) -> None:
            fsync(descriptor)
            self._held.append(os.dup(descriptor))
            self._note(Path(f"/proc/self/fd/{descriptor}"))

        with mock.patch.object(os, "fsync", fsync_and_note):
            yield

    def _note(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self.names[inode] = list_names(path)
        else:
            self.contents[inode] = path.read_bytes()

    def leave_forced(self, inode: int, target: Path) -> None:
        """Write what is left if names and contents need an fsync."""
        target.mkdir()
        for name, (child, is_directory) in self.names.get(inode, {}).items():
            if is_directory:
                self.leave_forced(child, target / name)
            else:
                (target / name).write_bytes(self.contents.get(child, b""))

    def leave_names(self, source: Path, target: Path) -> None:
        """Write what is left if names come to the disk by themselves."""
        target.mkdir()
        for name, (child, is_directory) in list_names(source).items():
            if is_directory:
                self.leave_names(source / name, target / name)
            else:
                (target / name).write_bytes(self.contents.get(child, b""))


def list_names(path: Path) -> dict[str, tuple[int, bool]]:
    with os.scandir(path) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


@pytest.mark.parametrize("has_names", [False, True])
def test_power_failure_leaves_the_old_or_the_new(
    tmp_path: Path, has_names: bool
) -> None:
    disk, parent, counter = Disk(), tmp_path / "parent", itertools.count(1)
    parent.mkdir()

    def leave(operation: str = "") -> None:
        target = tmp_path / f"left-{next(counter)}"
        if has_names:
            disk.leave_names(parent, target)
        else:
            disk.leave_forced(parent.stat().st_ino, target)

    with disk.watch():
        make_old(parent / "job")
        with before_each_operation(leave):
            live(parent / "job")
    leave()
    disk.close()

    num_left = next(counter) - 1
    assert num_left > 30
    left = [tmp_path / f"left-{n + 1}" / "job" for n in range(num_left)]
    found = [assert_survived(directory) for directory in left]
    assert found == sorted(found)
    assert set(found) == {3, 4}
    assert found[-1] == 4  # a commit that has returned is never lost


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
    ]


def test_manifest_is_gone_for_good_before_the_rest(tmp_path: Path) -> None:
    make_old(tmp_path)
    store, _, _ = start(tmp_path)
    done: list[str] = []
    with before_each_operation(done.append):
        files.remove_tree(
            store.directory / "checkpoint-00000002", first="manifest.json"
        )
    store.release()
    assert done[:3] == ["unlink", "open", "fsync"]
    assert done.count("unlink") == 4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
