"""Durable files: the only module of the package that writes files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TextIO

from elasticrun.checkpoint.files.recorded import (
    BLOCK_SIZE,
    FileRecord,
    compare,
    open_plain,
    open_recorded,
)
from elasticrun.checkpoint.files.streams import ChecksumWriter, write_through

WRITE_SIZE = 16 << 20
TEMPORARY_SUFFIX = ".tmp"
_BEGIN_WRITING = 2  # Linux's SYNC_FILE_RANGE_WRITE: begin, and wait for nothing.


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
        writer = write_through(ChecksumWriter(file.write), write)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, writer.size, writer.crc32)


def write_blocks(
    path: Path, blocks: Iterable[memoryview], *, checksum: Callable[[], int]
) -> FileRecord:
    """Create the file with these blocks, as `write_file` does.

    The disk works while the blocks are handed over, which promises nothing yet.

    Args:
        checksum: Returns the checksum of all of them; asked when they are on the disk,
            so that it can be computed meanwhile.
    """
    size = 0
    with open(path, "xb", buffering=0) as file:
        for block in blocks:
            while block:
                num_bytes = file.write(block[:WRITE_SIZE])
                _sync_file_range(file.fileno(), size, num_bytes, _BEGIN_WRITING)
                size += num_bytes
                block = block[num_bytes:]
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, size, checksum())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file's content durably: a crash leaves the old or the new content.

    One writer at a time: a temporary file left by a crash goes, and so does a link of
    its name, which would have another file written over.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


class AppendedFile:
    """A file that is appended to without a buffer, and may be cut; not durable by it.

    Attributes:
        size: How many bytes it has.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        self.size = os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Write all of it to the end."""
        while data:
            data = data[os.write(self._descriptor, data) :]
        self.size = os.fstat(self._descriptor).st_size

    def cut(self, size: int) -> None:
        """Cut off what is behind so many bytes."""
        if size != self.size:
            os.ftruncate(self._descriptor, size)
            self.size = size

    def force(self) -> None:
        """Force it to the disk, unless it is closed and therefore there."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Force it to the disk, and close it."""
        self.force()
        os.close(self._descriptor)
        self._descriptor = -1


def make_empty_file(path: Path) -> None:
    """Make a file durably.

    Raises:
        OSError: The file exists or could not be made.
    """
    open(path, "xb").close()
    fsync_directory(path.parent)


def copy_file(source: Path, target: Path, *, record: FileRecord) -> FileRecord:
    """Copy the content, not the inode, and check it against the source's record.

    A hard link would be cheaper, but one flipped bit would then damage every
    checkpoint that shares the file.

    Raises:
        DamagedFileError: The source is not what `record` says.
    """
    with open_recorded(source, record) as reader:
        copied = write_file(
            target, lambda writer: shutil.copyfileobj(reader, writer, BLOCK_SIZE)
        )
    compare(source, record, size=copied.size, crc32=copied.crc32)
    return copied


def append_line(path: Path, line: bytes) -> None:
    """Append a line by one write, below one that a writer may have left unfinished.

    Several processes may do so at once. The folder must be there.

    Raises:
        ValueError: There is something else than a plain file: a link, a pipe.
        OSError: It could not be written.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = open_plain(str(path), flags)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def move_over(path: Path, target: Path) -> None:
    """Give a file the name of another one, which goes."""
    os.replace(path, target)


def open_append(path: Path) -> TextIO:
    """Open a file of lines to append to; a finished line survives a killed process.

    Raises:
        ValueError: There is something else than a plain file: a link, a pipe.
    """
    make_directory(path.parent)
    return open(path, "a", buffering=1, encoding="utf-8", opener=open_plain)


def open_shared(path: Path) -> io.FileIO:
    """Open a file that processes share, for reading and `overwrite`; it may be new.

    Raises:
        ValueError: There is something else than a plain file: a link, a pipe.
        OSError: It cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return io.FileIO(open_plain(str(path), flags), "r+")


def overwrite(file: io.FileIO, data: bytes) -> None:
    """Replace the content in place, for a file whose inode must stay the same."""
    os.ftruncate(file.fileno(), 0)
    file.seek(0)
    file.write(data)
    os.fsync(file.fileno())


def find_size(path: Path) -> int | None:
    """Return the size, or None if nothing is there; unlike `Path.exists`, never guess.

    Raises:
        OSError: It cannot be told.
    """
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_writable(path: Path) -> None:
    """Refuse a directory in which this process cannot make files.

    Raises:
        PermissionError: It is not writable.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        code = errno.EACCES
        raise PermissionError(code, os.strerror(code), str(path))


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


def remove_tree(path: Path, *, first: str, last: str) -> None:
    """Remove the directory with everything in it.

    The file `first` is renamed to `last` before anything is removed, and that goes
    after everything else. So half a removal leaves a directory without the one file
    and with the other, or an empty one. A link to a directory is removed, not what it
    leads to; and others may remove it too.
    """
    if path.is_symlink():
        os.unlink(path)
        return
    with contextlib.suppress(FileNotFoundError):  # Here and below: gone already.
        os.replace(path / first, path / last)
        fsync_directory(path)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):
            with os.scandir(path) as found:
                others = [each for each in found if each.name != last]
            for each in others:
                _remove(each)
            fsync_directory(path)
            shutil.rmtree(path)


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)


def fsync_file(path: Path) -> None:
    """Force a plain file's content to the disk, whoever has written it.

    Raises:
        ValueError: It is something else: a directory, a link.
        OSError: It could not be forced there.
    """
    with open(path, "rb", opener=open_plain) as file:
        os.fsync(file.fileno())


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


_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (
    *(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
)
