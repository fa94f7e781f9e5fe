"""Durable files, known by size and checksum: the only module that writes files.

A file is durable once its content is on the disk (`os.fsync`) and so is its name, which
is its folder's content (`fsync_directory`). One that replaces another is written under
a temporary name, forced to the disk, and renamed: a crash leaves the old or the new.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO, TypeVar, cast

from elasticrun.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WRITE_SIZE = 16 << 20
TEMPORARY_SUFFIX = ".tmp"
_LARGEST_START = 64 << 10
TAIL_SIZE = 1024  # Bytes before a cut by which a file is known again.
_BEGIN_WRITING = 2  # Linux's SYNC_FILE_RANGE_WRITE: begin, and wait for nothing.
BLOCK_SIZE = 1 << 20
PAGE_SIZE = 4096
_WORTH_CHECKSUM_THREAD = 1 << 20  # Bytes.
_WORTH_DIRECT = 1 << 20
LARGEST_SMALL_FILE = 64 << 20  # A manifest lists some 600,000 files in as much.


class DamagedFileError(CheckpointError):
    """A file's content is not what was written: it is missing, torn or changed."""


class StoreUnreachableError(OSError):
    """A store or a disk cannot be read: it is gone, refuses access, or has failed.

    Neither damage nor absence, so nobody may go on without what could not be read.
    """


class FileRecord(NamedTuple):
    """What a file must hold to be the one that was written."""

    name: str
    size: int
    crc32: int


def open_checked(path: Path, record: FileRecord, *, is_read: bool = True) -> BinaryIO:
    """Open a file for reading once its size and checksum have been found right.

    Args:
        is_read: Whether to look at more than the size.
    """
    with ExitStack() as closed_on_error:
        file = closed_on_error.enter_context(open_recorded(path, record))
        # Before it is read: it may be a huge hole.
        check_size(path, record, os.fstat(file.fileno()).st_size)
        if is_read:
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


def open_plain(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a plain file only: no link that leads elsewhere, no pipe to hang on.

    And none that another user has put there: it belongs to this user, to root, or to
    the owner of its folder, as all do where a file server maps users.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
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


class ErrorKeepingWriter(io.BufferedIOBase):
    """A write-only stream that keeps the error with which a write has failed.

    It has no `fileno()`, which would let a writer bypass it, as the legacy format of
    `torch.save` does.

    Attributes:
        error: What that has raised, whatever a writer has made of it.
    """

    def __init__(self, take: Callable[[memoryview], object]) -> None:
        self._take = take
        self.error: OSError | MemoryError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        with memoryview(data) as view:
            try:
                self._take(view)
            except (OSError, MemoryError) as error:
                self.error = error
                raise
            return view.nbytes


class ChecksumWriter(ErrorKeepingWriter):
    """Also computes the size and the checksum of the bytes.

    Of many at once another thread computes it, while they are written.
    """

    def __init__(self, take: Callable[[memoryview], object]) -> None:
        super().__init__(take)
        self.size = 0
        self.crc32 = 0

    def write(self, data: ReadableBuffer, /) -> int:
        def compute() -> None:
            self.crc32 = zlib.crc32(data, self.crc32)

        with memoryview(data) as view:
            size = view.nbytes
            if not view.c_contiguous:  # As a file says of them.
                raise BufferError(
                    f"{size} bytes to be written are not contiguous; copy them first "
                    "(numpy.ascontiguousarray)"
                )
        thread = None
        if size >= _WORTH_CHECKSUM_THREAD:
            thread = threading.Thread(target=compute, name="elasticrun-checksum")
            thread = thread if start_thread(thread) else None
        try:
            super().write(data)
        finally:
            if thread is not None:
                thread.join()  # Whoever has given the bytes may change them then.
        if thread is None:
            compute()
        self.size += size
        return size


def start_thread(thread: threading.Thread) -> bool:
    """Return whether the thread could be started; not at a process's limit, or end."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


_Writer = TypeVar("_Writer", bound=ErrorKeepingWriter)


def write_through(writer: _Writer, write: Callable[[BinaryIO], object]) -> _Writer:
    """Call `write` with a stream, and return that; raise what the stream has raised.

    `torch.save` raises a RuntimeError of its own where a file could not be written,
    which would be taken for a mistake of the program.
    """
    try:
        write(cast(BinaryIO, writer))
    except Exception as error:
        if writer.error is None or writer.error is error:
            raise
        raise writer.error from error
    return writer


def write_file(
    path: Path, write: Callable[[BinaryIO], object], *, is_forced: bool = True
) -> FileRecord:
    """Create the file with what `write` puts into it, and force it to the disk.

    Its name is durable only after `fsync_directory`. After an error a part of the
    file may be left.

    Args:
        path: A file that does not exist; two writers of one file would mix.
        is_forced: Whether it is to survive a power cut; else somebody forces it later.
    """
    with open(path, "xb") as file:
        writer = write_through(ChecksumWriter(file.write), write)
        file.flush()
        if is_forced:
            os.fsync(file.fileno())
    return FileRecord(path.name, writer.size, writer.crc32)


def write_blocks(
    path: Path, blocks: Iterable[memoryview], *, is_forced: bool = True
) -> FileRecord:
    """Create the file with these blocks, as `write_file` does, while training runs.

    Training wants the cores. So large blocks do not go through the system's cache,
    whose pages are fresh memory: to touch them first can take longer than the disk.
    """
    size = crc32 = 0
    with open(path, "xb", buffering=0) as file:
        for block in blocks:
            while block:
                piece = block[:WRITE_SIZE]
                num_bytes = _write_directly(file, piece) if is_forced else 0
                num_bytes = num_bytes or file.write(piece)
                if is_forced:
                    _sync_file_range(file.fileno(), size, num_bytes, _BEGIN_WRITING)
                # While the disk writes. A thread of its own for it would be one more
                # than there are cores, if training has all but one.
                crc32 = zlib.crc32(block[:num_bytes], crc32)
                size += num_bytes
                block = block[num_bytes:]
        if is_forced:
            os.fsync(file.fileno())
    return FileRecord(path.name, size, crc32)


def _write_directly(file: io.FileIO, block: memoryview) -> int:
    """Write whole pages from memory to the disk, and return how many bytes.

    None where that is not worth it, or where the file system, or the block's place in
    memory, does not allow it.
    """
    if len(block) < _WORTH_DIRECT:
        return 0
    whole_pages = block[: len(block) // PAGE_SIZE * PAGE_SIZE]
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        return file.write(whole_pages)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


def write_atomically(path: Path, data: bytes, *, is_forced: bool = True) -> None:
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
        if is_forced:
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if is_forced:
        fsync_directory(path.parent)


def write_anew(path: Path, data: bytes) -> None:
    """Write a file in the place of what is there: a link leads nowhere. Not durable.

    Where another process does the same at once, one of them writes.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(FileExistsError), open(path, "xb") as file:
        file.write(data)


class AppendedFile:
    """A file that is appended to without a buffer, and may be cut; not durable by it.

    Forks of this process may append, too.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o666)
        status = os.fstat(self._descriptor)
        self.identity = identity_of(status)
        # What forks share: its size, and whether others have appended.
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("q")
        self._shared[0] = status.st_size
        self._checksum = 0  # When it is closed.

    @property
    def size(self) -> int:
        return self._shared[0]

    @property
    def is_shared(self) -> bool:
        """Whether others have appended to it since it was opened."""
        return self._shared[1] != 0

    def append(self, data: bytes) -> None:
        expected = self.size
        try:
            while data:
                written = os.write(self._descriptor, data)
                expected += written
                data = data[written:]
        finally:
            self._shared[0] = os.fstat(self._descriptor).st_size
            self._shared[1] |= self.size != expected

    def checksum(self, size: int) -> int:
        """Return the checksum of the last `TAIL_SIZE` bytes before one."""
        if self._descriptor < 0:
            return self._checksum
        start = max(0, size - TAIL_SIZE)
        return zlib.crc32(os.pread(self._descriptor, size - start, start))

    def cut(self, size: int) -> None:
        """Cut off what is behind so many bytes."""
        if size != self.size:
            os.ftruncate(self._descriptor, size)
            self._shared[0] = size

    def force(self) -> None:
        """Force it to the disk, unless it is closed and therefore there."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Force it to the disk, and close it."""
        self.force()
        self._checksum = self.checksum(self.size)
        os.close(self._descriptor)
        self._descriptor = -1


class OverwrittenFile:
    """A small file that is overwritten in one write, which a kill does not tear."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = open_plain(str(path), flags)

    def read(self) -> bytes:
        """Return the content, without the spaces behind it."""
        return os.pread(self._descriptor, _LARGEST_START, 0).rstrip()

    def replace(self, data: bytes) -> None:
        """Write it over what is there; what was longer is filled up with spaces."""
        size = os.fstat(self._descriptor).st_size
        os.pwrite(self._descriptor, data.ljust(min(size, _LARGEST_START)), 0)


def make_empty_file(path: Path) -> None:
    """Make a file durably."""
    open(path, "xb").close()
    fsync_directory(path.parent)


def copy_file(
    source: Path, target: Path, *, record: FileRecord, is_forced: bool = True
) -> FileRecord:
    """Copy the content, not the inode, and check it against the source's record.

    A hard link would be cheaper, but one flipped bit would then damage every
    checkpoint that shares the file.
    """
    with open_recorded(source, record) as reader:
        copied = write_file(
            target,
            lambda writer: shutil.copyfileobj(reader, writer, BLOCK_SIZE),
            is_forced=is_forced,
        )
    compare(source, record, size=copied.size, crc32=copied.crc32)
    return copied


def append_line(path: Path, line: bytes) -> None:
    """Append a line by one write, below one that a writer may have left unfinished.

    Several processes may do so at once. The folder must be there.
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
    """Open a file of lines to append to; a finished line survives a killed process."""
    make_directory(path.parent)
    return open(path, "a", buffering=1, encoding="utf-8", opener=open_plain)


def open_shared(path: Path) -> io.FileIO:
    """Open a file that processes share, for reading and `overwrite`; it may be new."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return io.FileIO(open_plain(str(path), flags), "r+")


def open_anew(path: Path) -> io.BufferedRandom:
    """Open a new file in the place of what is there, which may be open elsewhere."""
    path.unlink(missing_ok=True)
    return open(path, "x+b")


def overwrite(file: io.FileIO, data: bytes) -> None:
    """Replace the content in place, for a file whose inode must stay the same."""
    os.ftruncate(file.fileno(), 0)
    file.seek(0)
    file.write(data)
    os.fsync(file.fileno())


def find_size(path: Path) -> int | None:
    """Return the size, or None if nothing is there; raise where nobody can tell."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_writable(path: Path) -> None:
    """Refuse a directory in which this process cannot make files."""
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
    """Force a plain file's content to the disk, whoever has written it."""
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
