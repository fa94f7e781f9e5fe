"""Durable files: the one module of the package that writes any."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TextIO

from elasticrun.checkpoint.recorded import (
    BLOCK_SIZE,
    FileRecord,
    compare,
    open_plain,
    open_recorded,
)
from elasticrun.checkpoint.streams import (
    NotingWriter,
    write_measured,
    write_through,
)
from elasticrun.checkpoint.writeback import begin_writeback

WRITE_SIZE = 16 << 20
TEMPORARY_SUFFIX = ".tmp"
_TOKEN = re.compile("[0-9a-f]{16}")
_LONGEST = 200  # Bytes of a name, so that the temporary one fits into 255.


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
        writer = write_measured(file, write)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, writer.size, writer.crc32)


def write_blocks(
    path: Path, blocks: Iterable[memoryview], *, checksum: Callable[[], int]
) -> FileRecord:
    """Create the file with these blocks, and force it to the disk.

    The disk works while the blocks are handed over. After an error a part of the file
    may be left.

    Args:
        path: A file that does not exist.
        checksum: Returns the checksum of all of them; asked when they are on the disk,
            so that it can be computed meanwhile.

    Raises:
        OSError: The file exists or could not be written.
    """
    size = 0
    with open(path, "xb", buffering=0) as file:
        for block in blocks:
            while block:
                num_bytes = file.write(block[:WRITE_SIZE])
                begin_writeback(file.fileno(), size, num_bytes)
                size += num_bytes
                block = block[num_bytes:]
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, size, checksum())


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


def write_note(path: Path, data: bytes) -> None:
    """Make a file whose name is durable, and whose content matters only to the living.

    It may be there already.
    """
    with open(path, "wb") as file:
        file.write(data)
    fsync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file, which may be gone already; a crash may bring it back."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file durably by what `write` puts into a stream.

    A crash or an error leaves the old content or the new, or no file if there was
    none. Several may write at once, and each result is whole. The mode of a file that
    is there is kept, also while its successor is written, and a link stays a link.

    Args:
        write: Gets a stream to write to, which cannot seek.

    Raises:
        ValueError: There is something else than a file: a device, a directory.
        OSError: It could not be written.
    """
    path = Path(os.path.realpath(path))
    mode = _mode_of_file(path)
    _remove_leftovers(path)
    temporary, file = _open_temporary(path, is_private=mode is not None)
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            write_through(NotingWriter(file), write)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
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


def remove_tree(path: Path, *, first: str) -> None:
    """Remove the directory with everything in it, and durably `first` before the rest.

    Half a removal then leaves a directory without the file that makes it count. A link
    to a directory is removed, not what it leads to; and others may remove it too.
    """
    if path.is_symlink():
        os.unlink(path)
        return
    try:
        os.unlink(path / first)
    except FileNotFoundError:
        pass
    else:
        fsync_directory(path)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # Somebody else was faster.
            shutil.rmtree(path)


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


def _mode_of_file(path: Path) -> int | None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"{path} is not a plain file, so it cannot be replaced by one."
        )
    return stat.S_IMODE(mode)


def _open_temporary(path: Path, *, is_private: bool) -> tuple[Path, BinaryIO]:
    """Create a file beside `path`, and lock it for as long as its writer lives.

    Args:
        is_private: Whether only its owner may open it, until it gets another mode.
    """

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    while True:
        name = f"{_prefix(path)}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        temporary = path.with_name(name)
        opener = open_private if is_private else None
        file = open(temporary, "xb", opener=opener)  # noqa: SIM115 (the caller closes it)
        # Somebody who clears leftovers away may have been faster than the lock.
        if _lock(file, fcntl.LOCK_EX) is None or os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _prefix(path: Path) -> str:
    """Return how the names of temporary files for this one begin."""
    return f".{os.fsencode(path.name)[:_LONGEST].decode(errors='ignore')}."


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of this file have left: nobody locks it any more."""
    prefix = _prefix(path)
    for name in os.listdir(path.parent):
        middle = name.removeprefix(prefix).removesuffix(TEMPORARY_SUFFIX)
        if name != f"{prefix}{middle}{TEMPORARY_SUFFIX}" or not _TOKEN.fullmatch(
            middle
        ):
            continue
        with contextlib.suppress(OSError), open(path.with_name(name), "rb") as file:
            if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                os.unlink(path.with_name(name))


def _lock(file: BinaryIO, how: int) -> bool | None:
    """Return whether the open file could be locked; None where there are no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:  # Some network file systems have none.
        return None
    return True
