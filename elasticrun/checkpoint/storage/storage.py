"""A storage of checkpoints, an interface; and a directory, the usual one.

A storage has one folder of files for each checkpoint, and a few files beside the
folders. Names have no slashes. A folder with a manifest is a checkpoint. One with a
file `DRAFT_NAME` instead is a draft: being written, or being removed. A folder with
neither belongs to somebody else, whatever its name.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import (
    Captured,
    FileRecord,
    StoreUnreachableError,
)
from elasticrun.checkpoint.storage.lock import DirectoryLock, find_owner
from elasticrun.checkpoint.storage.place import (
    DRAFT_NAME,
    MANIFEST_NAME,
    OwnerProcess,
    Place,
)

_PAUSES = 0.1, 0.9  # Seconds between tries to read.

_Found = TypeVar("_Found")


class Storage(ABC):
    """Keeps the checkpoints of one job at one place.

    What cannot be written, read or told raises an OSError; a FileNotFoundError says
    that it is known to be absent, a DamagedFileError that it is not what was written.
    Whoever would write where another job has taken over gets a CheckpointError.
    """

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where it is, for people."""

    @abstractmethod
    def locate(self, *names: str) -> Place:
        """Return where a folder, or a file in it, is."""

    # Who may write.

    @abstractmethod
    def acquire(self, *, timeout: float) -> None:
        """Keep other jobs out; make the place if it is new.

        Args:
            timeout: Seconds to wait for an owner, which may be about to exit.
        """

    @abstractmethod
    def release(self) -> None:
        """Let another job have it; it may be free already."""

    @abstractmethod
    def find_owner(self) -> OwnerProcess | None:
        """Return who uses it now, without taking it."""

    @abstractmethod
    def folder_of_lost_owner(self) -> str | None:
        """Return the folder that a job may still write into though it has lost this."""

    # Files beside the folders, which are replaced as a whole.

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the names of folders, and perhaps of files beside them."""

    @abstractmethod
    def read(self, *names: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace a small file durably: a crash leaves the old or the new content."""

    # Folders.

    @abstractmethod
    def begin(self, folder: str) -> None:
        """Make a draft without files; one that was left there goes."""

    @abstractmethod
    def is_draft(self, folder: str) -> bool:
        """Return whether a folder was begun, or is being removed, by elasticrun."""

    @abstractmethod
    def join(self, folder: str) -> bool:
        """Return whether a draft that another replica has begun is to be seen here."""

    @abstractmethod
    def commit(self, folder: str, manifest: bytes) -> None:
        """Put the manifest, durably, after all other files: it makes the folder count.

        `DRAFT_NAME` goes then; one that cannot be removed does not matter.
        """

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder in any condition; half a removal leaves a draft."""

    @abstractmethod
    def measure_folder(self, folder: str) -> int:
        """Return how many bytes are in it, 0 if that cannot be told."""

    # Files in folders.

    @abstractmethod
    def write(
        self, folder: str, name: str, write: Callable[[BinaryIO], object]
    ) -> FileRecord:
        """Write a file with what `write` puts into a stream that cannot seek."""

    def write_captured(self, folder: str, name: str, captured: Captured) -> FileRecord:
        """Write a file from memory; a storage may compute its checksum again."""
        return self.write(folder, name, lambda file: file.writelines(captured.blocks))

    @abstractmethod
    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        """Copy a file from one folder to another, and check it against its record."""

    def verify(self, folder: str, record: FileRecord) -> None:
        """Read every byte of a file."""
        self.open_checked(folder, record).close()

    @abstractmethod
    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        """Open a file for reading once its size and checksum have been found right."""

    @abstractmethod
    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Return the size of each of these files, None for what is not there.

        Whoever removes what has no manifest must not take an unreachable one for none.
        """


def not_ours_error(place: Place) -> FileExistsError:
    """Return the error for something of others in the place of a new folder."""
    return FileExistsError(
        f"{place} is in the way: elasticrun did not make it, so it will not remove it. "
        "Move it to another place."
    )


class LocalStorage(Storage):
    """A directory, perhaps on a file system that machines share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = DirectoryLock(directory)

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
            durable.make_empty_file(path / DRAFT_NAME)
        except OSError:  # Else each save on a full disk would leave a folder.
            with contextlib.suppress(OSError):
                self.remove(folder)
            raise

    def is_draft(self, folder: str) -> bool:
        path = self.locate(folder)
        try:
            # An empty one was just made, or is about to go.
            names = _retry(lambda: os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return not names or DRAFT_NAME in names

    def join(self, folder: str) -> bool:
        return self.locate(folder).is_dir()

    def commit(self, folder: str, manifest: bytes) -> None:
        path = self.locate(folder)
        self._lock.check()
        durable.fsync_directory(path)
        durable.write_atomically(path / MANIFEST_NAME, manifest)
        durable.fsync_directory(path.parent)
        with contextlib.suppress(OSError):
            os.unlink(path / DRAFT_NAME)

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
        return durable.write_file(self.locate(folder, name), write)

    def write_captured(self, folder: str, name: str, captured: Captured) -> FileRecord:
        path = self.locate(folder, name)
        return durable.write_blocks(path, captured.blocks, checksum=captured.checksum)

    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        return durable.copy_file(
            self.locate(source, record.name),
            self.locate(folder, record.name),
            record=record,
        )

    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        path = self.locate(folder, record.name)
        return _retry(lambda: durable.open_checked(path, record))

    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        names = tuple(names)  # Not their paths: a garbage collection would follow.
        return _retry(
            lambda: {
                name: durable.find_size(self.locate(folder, name)) for name in names
            }
        )


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
