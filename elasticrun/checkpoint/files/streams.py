"""Write-only streams to files, which keep errors and compute checksums."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
    """Also computes the size and the checksum of the bytes."""

    def __init__(self, take: Callable[[memoryview], object]) -> None:
        super().__init__(take)
        self.size = 0
        self.crc32 = 0

    def write(self, data: ReadableBuffer, /) -> int:
        size = super().write(data)
        self.size += size
        self.crc32 = zlib.crc32(data, self.crc32)
        return size


_Writer = TypeVar("_Writer", bound=ErrorKeepingWriter)


def write_through(writer: _Writer, write: Callable[[BinaryIO], object]) -> _Writer:
    """Call `write` with a stream, and return that.

    Raises:
        OSError: A file could not be written. `torch.save` then raises a RuntimeError of
            its own, which would be taken for a mistake of the program.
        MemoryError: There was no room for all of it.
    """
    try:
        write(cast(BinaryIO, writer))
    except Exception as error:
        if writer.error is None or writer.error is error:
            raise
        raise writer.error from error
    return writer
