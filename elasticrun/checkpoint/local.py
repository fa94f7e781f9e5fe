"""Checkpoints in a directory of a file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from elasticrun.checkpoint import files, recorded
from elasticrun.checkpoint.lock import DirectoryLock, Owner, find_owner
from elasticrun.checkpoint.manifest import MANIFEST_NAME
from elasticrun.checkpoint.recorded import FileRecord
from elasticrun.checkpoint.storage import NOTE_PREFIX, Storage, in_the_way
from elasticrun.errors import CheckpointWarning


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
        mode = self._directory.stat().st_mode
        if mode & stat.S_IWOTH:
            warnings.warn(
                f"{self._directory} can be written to by everybody (mode "
                f"{stat.S_IMODE(mode):o}). Who can change a checkpoint decides what "
                f"the job computes. Take that right away: chmod o-w {self._directory}",
                CheckpointWarning,
                stacklevel=3,
            )

    def release(self) -> None:
        self._lock.release()

    def find_owner(self) -> Owner | None:
        return find_owner(self._directory)

    def left_behind(self) -> str | None:
        return None  # A lock ends with its process, which then writes no more.

    def list_names(self) -> list[str]:
        return os.listdir(self._directory)

    def read(self, *names: str) -> bytes:
        return self.locate(*names).read_bytes()

    def replace(self, name: str, data: bytes) -> None:
        files.write_atomically(self.locate(name), data)

    def begin(self, folder: str, *, token: str) -> None:
        self._lock.check()
        path = self.locate(folder)
        if files.find_size(path) is not None:
            if not self.has_note(folder):
                raise in_the_way(path)
            self.remove(folder)
        files.write_note(self._note_of(folder), token.encode())
        files.make_directory(path)

    def has_note(self, folder: str) -> bool:
        return files.find_size(self._note_of(folder)) is not None

    def read_note(self, folder: str) -> str:
        return self._note_of(folder).read_text(errors="replace")

    def remove_note(self, folder: str) -> None:
        files.remove_file(self._note_of(folder))

    def _note_of(self, folder: str) -> Path:
        return self.locate(NOTE_PREFIX + folder)

    def has(self, folder: str) -> bool:
        return self.locate(folder).is_dir()

    def commit(self, folder: str, name: str, data: bytes) -> None:
        path = self.locate(folder)
        self._lock.check()
        files.fsync_directory(path)
        files.write_atomically(path / name, data)
        files.fsync_directory(path.parent)
        with contextlib.suppress(OSError):
            self.remove_note(folder)

    def remove(self, folder: str) -> None:
        self._lock.check()
        if not self.has_note(folder):
            self._note_removal(folder)
        files.remove_tree(self.locate(folder), first=MANIFEST_NAME)
        files.fsync_directory(self._directory)
        self.remove_note(folder)

    def _note_removal(self, folder: str) -> None:
        try:
            files.write_note(self._note_of(folder), b"")
        except OSError as error:
            # Where nothing fits, to remove something is what helps.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def measure_folder(self, folder: str) -> int:
        try:
            with os.scandir(self.locate(folder)) as found:
                return sum(each.stat(follow_symlinks=False).st_size for each in found)
        except OSError:
            return 0

    def write(
        self, folder: str, name: str, write: Callable[[BinaryIO], object]
    ) -> FileRecord:
        return files.write_file(self.locate(folder, name), write)

    def write_blocks(
        self,
        folder: str,
        name: str,
        blocks: Iterable[memoryview],
        *,
        checksum: Callable[[], int],
    ) -> FileRecord:
        path = self.locate(folder, name)
        return files.write_blocks(path, blocks, checksum=checksum)

    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        return files.copy_file(
            self.locate(source, record.name),
            self.locate(folder, record.name),
            record=record,
        )

    def measure(self, folder: str, name: str) -> FileRecord:
        return recorded.measure_file(self.locate(folder, name))

    def verify(self, folder: str, record: FileRecord) -> None:
        self.open_checked(folder, record).close()

    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        return recorded.open_checked(self.locate(folder, record.name), record)

    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        path = self.locate(folder)
        return {name: files.find_size(path / name) for name in names}
