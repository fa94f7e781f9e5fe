"""A checkpoint, as a draft while ranks write into it and once it is committed.

1. Rank 0 begins a draft: a folder with the file `DRAFT_NAME`.
2. All ranks write their files into it, and force them to the disk.
3. Rank 0 commits it: each file is there with its size, the manifest can be read back,
   and then takes its name. From that moment on the folder is a checkpoint.
4. `DRAFT_NAME` goes. A folder that still has only that is removed at the next start.

Also those that a storage has: names, what is found there, the counter beside them.
"""

from __future__ import annotations

import errno
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import (
    DamagedFileError,
    FileRecord,
    StoreUnreachableError,
    check_size,
)
from elasticrun.checkpoint.manifest import Manifest, check_file_name, decode
from elasticrun.checkpoint.storage.place import MANIFEST_NAME, Place
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.errors import CheckpointError
from elasticrun.logger import Logger

logger = Logger(__name__)

_NAME = re.compile("checkpoint-([0-9]{8,})")

MUST_BE_SHARED = (
    "The checkpoint directory must be on a file system that all replicas see."
)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, open for reading.

    Attributes:
        time: When it was committed, in seconds since 1970.
        read: Returns the manifest.
    """

    path: Place
    number: int
    time: float
    read: Callable[[], Manifest] = field(compare=False, repr=False)
    storage: Storage = field(compare=False, repr=False)

    @classmethod
    def of(cls, path: Place, manifest: Manifest, storage: Storage) -> Checkpoint:
        number, time = manifest.number, manifest.time
        return cls(path, number, time, lambda: manifest, storage)

    @cached_property
    def manifest(self) -> Manifest:
        """What it says about itself; read when it is first asked for, once."""
        return self.read()

    def names(self) -> tuple[str, ...]:
        return tuple(record.name for record in self.manifest.files)

    def has(self, name: str) -> bool:
        return name in self.names()

    def check_sizes(self) -> None:
        """Check that every file is there with its size; no file is read."""
        records = self.manifest.files
        names = [record.name for record in records]
        sizes = self.storage.find_sizes(self.path.name, names)
        for record in records:
            if sizes[record.name] != record.size:
                check_size(self.path / record.name, record, sizes[record.name])

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading after its size and checksum have been checked."""
        record = self.manifest.record(name)
        try:
            return self.storage.open_checked(self.path.name, record)
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error} It cannot be trusted. Start the job again: it resumes from "
                "the newest good checkpoint."
            ) from error


@dataclass(frozen=True)
class Draft:
    """A checkpoint being written, which does not exist until it is committed."""

    storage: Storage
    folder: str
    number: int

    @property
    def path(self) -> Place:
        return self.storage.locate(self.folder)

    def write(self, name: str, write: Callable[[BinaryIO], object]) -> FileRecord:
        """Write one file and force it to the disk."""
        check_file_name(name)
        return self.storage.write(self.folder, name, write)

    def write_captured(self, name: str, blocks: Sequence[memoryview]) -> FileRecord:
        check_file_name(name)
        return self.storage.write_captured(self.folder, name, blocks)

    def copy(self, checkpoint: Checkpoint, name: str) -> FileRecord:
        """Carry a file over from another checkpoint in the same storage."""
        record = checkpoint.manifest.record(name)
        return self.storage.copy(checkpoint.path.name, self.folder, record)

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Make the checkpoint exist durably: on rank 0, once all ranks have written."""
        if manifest.number != self.number:
            raise ValueError(f"{self.path} cannot have the number {manifest.number}")
        self._check_present(manifest.files)
        data = manifest.encode()
        if decode(data) != manifest:
            raise CheckpointError(
                f"the manifest of {self.path} would be read back differently: "
                f"{manifest}. Nothing was committed. Please report this."
            )
        self.storage.commit(self.folder, data)
        return Checkpoint.of(self.path, manifest, self.storage)

    def abandon(self) -> None:
        """Remove what was written; rank 0 only. What is left stays a draft."""
        try:
            self.storage.remove(self.folder)
        except (OSError, CheckpointError) as error:
            logger.warning("%s could not be removed: %s", self.path, error)

    def _check_present(self, records: tuple[FileRecord, ...]) -> None:
        names = [record.name for record in records]
        sizes = self.storage.find_sizes(self.folder, names)
        for record in records:
            size = sizes[record.name]
            if size != record.size:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"{self.storage.locate(self.folder, record.name)} {found} on host "
                    f"{socket.gethostname()}, but its replica wrote {record.size} "
                    f"bytes. {MUST_BE_SHARED}"
                )


def checkpoint_name(number: int) -> str:
    """Return the name of the folder in which this checkpoint is kept."""
    return f"checkpoint-{number:08d}"


def number_of(name: str) -> int | None:
    """Return the number in a checkpoint's name, None for another name."""
    match = _NAME.fullmatch(name)
    number = int(match[1]) if match else None
    return number if number is None or checkpoint_name(number) == name else None


def list_numbers(storage: Storage) -> list[int]:
    """Return the numbers of what is named like a checkpoint, the newest first.

    In any condition; it may even be somebody else's: see `is_own`.
    """
    found = map(number_of, storage.list_names())
    return sorted((number for number in found if number is not None), reverse=True)


def is_own(storage: Storage, number: int) -> bool:
    """Return whether elasticrun made it: it is a checkpoint or a draft."""
    has_manifest = find_manifest(storage, number) is not None
    return has_manifest or storage.is_draft(checkpoint_name(number))


def read_checkpoint(storage: Storage, number: int) -> Checkpoint:
    """Open a checkpoint by its manifest, without reading its files."""
    name = checkpoint_name(number)
    source = storage.locate(name, MANIFEST_NAME)
    try:
        data = storage.read(name, MANIFEST_NAME)
    except NotADirectoryError as error:  # A file that is named like a checkpoint.
        raise FileNotFoundError(errno.ENOENT, error.strerror, str(source)) from error
    manifest = decode(data, source=str(source))
    if manifest.number != number:
        raise DamagedFileError(f"{source} is that of number {manifest.number}.")
    return Checkpoint.of(storage.locate(name), manifest, storage)


def is_committed(storage: Storage, number: int) -> bool:
    """Return whether it has a manifest, as far as can be told."""
    try:
        return find_manifest(storage, number) is not None
    except OSError:
        return False


def is_uncommitted(storage: Storage, number: int) -> bool:
    """Return whether it was begun and never committed."""
    try:
        return find_manifest(storage, number) is None
    except OSError:  # Unreachable; `find_newest` says what is wrong.
        return False


def find_manifest(storage: Storage, number: int) -> int | None:
    """Return the size of a checkpoint's manifest, None if it has none."""
    folder = checkpoint_name(number)
    return storage.find_sizes(folder, [MANIFEST_NAME])[MANIFEST_NAME]


def write_counter(storage: Storage, name: str, value: int) -> None:
    """Replace the count that a file keeps, durably."""
    storage.replace(name, _encode_counter(value))


def read_counter(storage: Storage, name: str) -> int:
    """Return the count that a file keeps, -1 if it is missing, damaged, unreadable."""
    try:
        data = storage.read(name)
        value = int(data.split()[0])
    except StoreUnreachableError:
        raise
    except (CheckpointError, OSError, IndexError, ValueError):
        return -1
    return value if data == _encode_counter(value) else -1


def _encode_counter(value: int) -> bytes:
    text = str(value).encode()
    return text + b" %08x\n" % zlib.crc32(text)
