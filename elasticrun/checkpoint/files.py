"""Durable, checksummed files: the one module of the package that writes files."""

from __future__ import annotations

import errno
import io
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO, cast

from elasticrun.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_SIZE = 1 << 20
TEMPORARY_SUFFIX = ".tmp"


class DamagedFileError(CheckpointError):
    """A file's content is not what was written: it is missing, torn or changed."""


class FileRecord(NamedTuple):
    """What a file must hold to be the one that was written."""

    name: str
    size: int
    crc32: int


class ChecksumWriter(io.BufferedIOBase):
    """A write-only stream that measures the bytes it hands on.

    It has no `fileno()`, which would let a writer bypass the checksum, as the legacy
    format of `torch.save` does.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        with memoryview(data) as view:
            self._file.write(view)
            self.size += view.nbytes
            self.crc32 = zlib.crc32(view, self.crc32)
            return view.nbytes


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> FileRecord:
    """Create the file with what `write` puts into it, and force it to the disk.

    Its name is durable only after `fsync_directory`. After an error a part of the
    file may be left.

    Args:
        path: A file that does not exist; two writers of one file would mix.
        write: Gets a stream to write to, which cannot seek.

    Raises:
        OSError: The file exists or could not be written.
    """
    with open(path, "xb") as file:
        writer = ChecksumWriter(file)
        write(cast(BinaryIO, writer))
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, writer.size, writer.crc32)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file's content durably: a crash leaves the old or the new content.

    One writer at a time: a temporary file left by a crash is written over.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def copy_file(source: Path, target: Path, *, record: FileRecord) -> FileRecord:
    """Copy the content, not the inode, and check it against the source's record.

    A hard link would be cheaper, but one flipped bit would then damage every
    checkpoint that shares the file.

    Raises:
        DamagedFileError: The source is not what `record` says.
    """
    with open(source, "rb") as reader:
        copied = write_file(
            target, lambda writer: shutil.copyfileobj(reader, writer, BLOCK_SIZE)
        )
    _compare(source, record, size=copied.size, crc32=copied.crc32)
    return copied


def open_checked(path: Path, record: FileRecord) -> BinaryIO:
    """Open a file for reading once its size and checksum have been found right.

    Raises:
        DamagedFileError: It is missing, or not what `record` says.
        OSError: It cannot be read.
    """
    with ExitStack() as closed_on_error:
        try:
            file = closed_on_error.enter_context(open(path, "rb"))
        except FileNotFoundError as error:
            raise DamagedFileError(
                f"{path} is missing; it had {record.size} bytes."
            ) from error
        size, crc32 = _measure(file)
        _compare(path, record, size=size, crc32=crc32)
        file.seek(0)
        closed_on_error.pop_all()
    return file


def open_append(path: Path) -> TextIO:
    """Open a file of lines to append to; a finished line survives a killed process."""
    make_directory(path.parent)
    return open(path, "a", buffering=1, encoding="utf-8")


def open_shared(path: Path) -> io.FileIO:
    """Open a file that processes share, for reading and `overwrite`; it may be new."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")


def overwrite(file: io.FileIO, data: bytes) -> None:
    """Replace the content in place, for a file whose inode must stay the same."""
    os.ftruncate(file.fileno(), 0)
    file.seek(0)
    file.write(data)
    os.fsync(file.fileno())


def find_size(path: Path) -> int | None:
    """Return the size, or None if nothing is there; unlike `Path.exists`, never guess.

    Raises:
        OSError: It cannot be told. Whoever removes what has no manifest must not take
            an unreachable one for none.
    """
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def check_writable(path: Path) -> None:
    """Refuse a directory in which this process cannot make files.

    Raises:
        PermissionError: It is not writable.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        code = errno.EACCES
        raise PermissionError(code, os.strerror(code), str(path))


def write_counter(path: Path, value: int) -> None:
    """Replace the count that a file keeps, durably."""
    write_atomically(path, _encode_counter(value))


def read_counter(path: Path) -> int:
    """Return the count that a file keeps, -1 if it is missing, damaged, unreadable."""
    try:
        data = path.read_bytes()
        value = int(data.split()[0])
    except (OSError, IndexError, ValueError):
        return -1
    return value if data == _encode_counter(value) else -1


def make_directory(path: Path) -> None:
    """Create the directory and its parents durably; it may exist already."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:  # another replica was faster, or it is a file
        if not path.is_dir():
            raise
    fsync_directory(path.parent)


def remove_tree(path: Path, *, first: str) -> None:
    """Remove the directory with everything in it, and durably `first` before the rest.

    Half a removal then leaves a directory without the file that makes it count.
    """
    try:
        os.unlink(path / first)
    except FileNotFoundError:
        pass
    else:
        fsync_directory(path)
    shutil.rmtree(path)


def fsync_directory(path: Path) -> None:
    """Force the directory's names to the disk, where its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # FUSE and SMB mounts often refuse this; their names need no fsync.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _encode_counter(value: int) -> bytes:
    text = str(value).encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _measure(file: io.BufferedReader) -> tuple[int, int]:
    size = crc32 = 0
    block = memoryview(bytearray(BLOCK_SIZE))
    while num_bytes := file.readinto(block):
        size += num_bytes
        crc32 = zlib.crc32(block[:num_bytes], crc32)
    return size, crc32


def _compare(path: Path, record: FileRecord, *, size: int, crc32: int) -> None:
    if size != record.size:
        raise DamagedFileError(
            f"{path} has {size} bytes, but {record.size} were written."
        )
    if crc32 != record.crc32:
        raise DamagedFileError(
            f"{path} has the checksum {crc32:08x}, but {record.crc32:08x} was written."
        )
