"""Checkpoints in a directory of a file system."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import (
    DamagedFileError,
    FileRecord,
    StoreUnreachableError,
)
from elasticrun.checkpoint.storage.lock import DirectoryLock, find_owner
from elasticrun.checkpoint.storage.place import (
    DRAFT_NAME,
    MANIFEST_NAME,
    UNFORCED_NAME,
    OwnerProcess,
)
from elasticrun.checkpoint.storage.storage import (
    Storage,
    not_ours_error,
)

_PAUSES = 0.1, 0.9  # Seconds between tries to read.

_Found = TypeVar("_Found")


class LocalStorage(Storage):
    """A directory, perhaps on a file system that machines share.

    Replicas that a launcher is about to replace force nothing to the disk: the next
    ones, of the same launcher, read it from this machine's memory, and force it then.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = DirectoryLock(directory)
        self._is_forced = True

    @property
    def place(self) -> Path:
        return self._directory

    def locate(self, *names: str) -> Path:
        return self._directory.joinpath(*names)

    def acquire(self, *, timeout: float) -> None:
        self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def find_owner(self) -> OwnerProcess | None:
        return find_owner(self._directory)

    def folder_of_lost_owner(self) -> str | None:
        return None  # A lock ends with its process, which then writes no more.

    def list_names(self) -> list[str]:
        return _retry(lambda: os.listdir(self._directory))

    def read(self, *names: str) -> bytes:
        return _retry(lambda: durable.read_small(self.locate(*names)))

    def replace(self, name: str, data: bytes) -> None:
        durable.write_atomically(self.locate(name), data)

    def begin(self, folder: str) -> None:
        self._lock.check()
        path = self.locate(folder)
        if durable.find_size(path) is not None:
            if not self.is_draft(folder):
                raise not_ours_error(path)
            self.remove(folder)
        try:
            durable.make_directory(path)
            if not self._is_forced:  # Before the folder is forced, with its names.
                durable.write_anew(path / UNFORCED_NAME, _own_launcher())
            durable.make_empty_file(path / DRAFT_NAME)
        except OSError:  # Else each save on a full disk would leave a folder.
            with contextlib.suppress(OSError):
                self.remove(folder)
            raise

    def is_draft(self, folder: str) -> bool:
        path = self.locate(folder)
        try:
            # An empty one was just made, or is about to go; `begin` marks it first.
            names = _retry(lambda: os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return not names or DRAFT_NAME in names or UNFORCED_NAME in names

    def join(self, folder: str) -> bool:
        return self.locate(folder).is_dir()

    def commit(self, folder: str, manifest: bytes) -> None:
        path = self.locate(folder)
        self._lock.check()
        if self._is_forced:
            durable.fsync_directory(path)
        durable.write_atomically(
            path / MANIFEST_NAME, manifest, is_forced=self._is_forced
        )
        if self._is_forced:
            durable.fsync_directory(path.parent)
        with contextlib.suppress(OSError):
            os.unlink(path / DRAFT_NAME)

    def unforced(self) -> LocalStorage:
        storage = copy.copy(self)
        storage._is_forced = False
        return storage

    def is_unforced(self, folder: str) -> bool:
        return self.find_sizes(folder, [UNFORCED_NAME])[UNFORCED_NAME] is not None

    def force(self, folder: str, names: Iterable[str]) -> None:
        path = self.locate(folder)
        try:
            for name in (*names, MANIFEST_NAME):
                durable.fsync_file(path / name)
        except ValueError as error:  # A link, or a file of another user.
            raise DamagedFileError(str(error)) from error
        durable.fsync_directory(path)
        durable.fsync_directory(path.parent)
        os.unlink(path / UNFORCED_NAME)
        durable.fsync_directory(path)  # Before those go that it lets do without.

    def _is_in_memory(self, folder: str) -> bool:
        """Return whether this replica's launcher has just had the folder written."""
        try:
            data = self.read(folder, UNFORCED_NAME)
        except (FileNotFoundError, NotADirectoryError):
            return False
        # Empty is what a power cut may leave of it.
        return data.startswith(b"%d " % os.getppid()) and data == _own_launcher()

    def remove(self, folder: str) -> None:
        self._lock.check()
        path = self.locate(folder)
        durable.remove_tree(path, first=MANIFEST_NAME, last=DRAFT_NAME)
        durable.fsync_directory(self._directory)

    def measure_folder(self, folder: str) -> int:
        try:
            with os.scandir(self.locate(folder)) as found:
                return sum(each.stat(follow_symlinks=False).st_size for each in found)
        except OSError:
            return 0

    def write(
        self, folder: str, name: str, write: Callable[[BinaryIO], object]
    ) -> FileRecord:
        path = self.locate(folder, name)
        return durable.write_file(path, write, is_forced=self._is_forced)

    def write_captured(
        self, folder: str, name: str, blocks: Sequence[memoryview]
    ) -> FileRecord:
        path = self.locate(folder, name)
        return durable.write_blocks(path, blocks, is_forced=self._is_forced)

    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        return durable.copy_file(
            self.locate(source, record.name),
            self.locate(folder, record.name),
            record=record,
            is_forced=self._is_forced,
        )

    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        path = self.locate(folder, record.name)
        is_in_memory = self._is_in_memory(folder)
        return _retry(
            lambda: durable.open_checked(path, record, is_read=not is_in_memory)
        )

    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        names = tuple(names)  # Not their paths: a garbage collection would follow.
        return _retry(
            lambda: {
                name: durable.find_size(self.locate(folder, name)) for name in names
            }
        )


def _own_launcher() -> bytes:
    """Return what names the launcher of this replica: no other one has had it.

    Nothing if it cannot be seen: in another container, or where /proc hides others.
    """
    import psutil

    try:
        launcher = psutil.Process(os.getppid())
        started = launcher.create_time()
    except psutil.Error:
        return b""
    return f"{launcher.pid} {started} {socket.gethostname()}\n".encode()


def _retry(look: Callable[[], _Found]) -> _Found:
    """Return what a look at the file system finds, which may fail once or twice."""
    for pause in (*_PAUSES, None):
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            if pause is None:
                raise StoreUnreachableError(
                    error.errno, error.strerror, error.filename
                ) from error
        time.sleep(pause)
    raise AssertionError("the last try has no pause")
