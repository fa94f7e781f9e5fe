"""Files with a recorded size and checksum: opened, measured and compared."""

from __future__ import annotations

import errno
import io
import os
import stat
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from elasticrun.errors import CheckpointError

BLOCK_SIZE = 1 << 20
LARGEST_SMALL_FILE = 64 << 20  # A manifest lists some 600,000 files in as much.


class DamagedFileError(CheckpointError):
    """A file's content is not what was written: it is missing, torn or changed."""


class FileRecord(NamedTuple):
    """What a file must hold to be the one that was written."""

    name: str
    size: int
    crc32: int


def open_checked(path: Path, record: FileRecord) -> BinaryIO:
    """Open a file for reading once its size and checksum have been found right."""
    with ExitStack() as closed_on_error:
        file = closed_on_error.enter_context(open_recorded(path, record))
        # Before it is read: it may be a huge hole.
        check_size(path, record, os.fstat(file.fileno()).st_size)
        size, crc32 = _measure(file)
        compare(path, record, size=size, crc32=crc32)
        file.seek(0)
        closed_on_error.pop_all()
    return file


def read_small(path: Path) -> bytes:
    """Return the content of a plain file that is to be read into memory."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            check_small(path, os.fstat(file.fileno()).st_size)
            return file.read(LARGEST_SMALL_FILE)
    except ValueError as error:
        raise DamagedFileError(str(error)) from error


def check_small(path: object, size: int) -> None:
    """Refuse to read a file into memory that is far too large."""
    if size > LARGEST_SMALL_FILE:
        raise DamagedFileError(
            f"{path} has {size} bytes, more than the {LARGEST_SMALL_FILE} that "
            "elasticrun ever writes there."
        )


def measure_file(path: Path) -> FileRecord:
    """Return what a plain file holds, whoever has written it."""
    with open(path, "rb", opener=open_plain) as file:
        size, crc32 = _measure(file)
    return FileRecord(path.name, size, crc32)


def compare(path: object, record: FileRecord, *, size: int, crc32: int) -> None:
    """Refuse a file that does not hold what was written."""
    check_size(path, record, size)
    if crc32 != record.crc32:
        raise DamagedFileError(
            f"{path} has the checksum {crc32:08x}, but {record.crc32:08x} was written."
        )


def check_size(path: object, record: FileRecord, size: int | None) -> None:
    """Refuse a file that is not as large as what was written; None: it is missing."""
    if size is None:
        raise missing_error(path, record)
    if size != record.size:
        raise DamagedFileError(
            f"{path} has {size} bytes, but {record.size} were written."
        )


def missing_error(path: object, record: FileRecord) -> DamagedFileError:
    """Return the error for a file that is not there."""
    return DamagedFileError(f"{path} is missing; it had {record.size} bytes.")


def open_recorded(path: Path, record: FileRecord) -> io.BufferedReader:
    """Open a file for reading that must be there, and be a plain one."""
    try:
        return open(path, "rb", opener=open_plain)
    except FileNotFoundError as error:
        raise missing_error(path, record) from error
    except ValueError as error:
        raise DamagedFileError(str(error)) from error


def _measure(file: io.BufferedReader) -> tuple[int, int]:
    size = crc32 = 0
    block = memoryview(bytearray(BLOCK_SIZE))
    while num_bytes := file.readinto(block):
        size += num_bytes
        crc32 = zlib.crc32(block[:num_bytes], crc32)
    return size, crc32


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Return the device and inode of a file."""
    return status.st_dev, status.st_ino


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a plain file, all if there are not more than `most`."""
    with open(path, "rb", opener=open_plain) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def open_plain(path: str, flags: int) -> int:
    """Open a plain file only: no link that leads elsewhere, no pipe to hang on.

    And none that another user has put there: it belongs to this user, to root, or to
    the owner of its folder, as all do where a file server maps users.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a link, not a plain file.") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a plain file.")
        if status.st_uid not in (os.geteuid(), 0):
            owner = os.stat(os.path.dirname(path) or os.curdir).st_uid
            if status.st_uid != owner:
                raise ValueError(
                    f"{path} belongs to user {status.st_uid}, neither to this one "
                    f"({os.geteuid()}) nor to the owner of its folder ({owner})."
                )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
