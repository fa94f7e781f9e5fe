"""Memory of the host for captured files, reused from save to save.

The first access to fresh memory takes ten times as long as copying into it. So the
memory is kept, and the next save copies into it; for the first save another thread
touches it beforehand.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import (
    PAGE_SIZE,
    ErrorKeepingWriter,
    start_thread,
    write_through,
)

CHUNK_SIZE = 64 << 20
_WORTH_TOUCHING = 16 << 20
_WORTH_THREADS = 4 << 20  # Bytes to copy from which on more threads are faster.
_MOST_THREADS = 4  # More do not make memory faster.
_WIPE_ON_FORK = 18  # Linux's; a fork neither needs the memory nor slows writes to it.


class NoMemoryLeftError(MemoryError):
    """There is not enough memory to capture everything."""


class CaptureBuffers:
    """Keeps the content of captured files until it is on the disk.

    Filled in the training thread, while training waits; read in the writer's. One save
    is over before the next one begins, so the two never meet.
    """

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._touched: deque[memoryview] = deque()
        self._end = 0
        self._is_used = False  # For a save.
        self.num_threads = 1

    def prepare(self, num_bytes: int) -> None:
        """Touch memory for the first save, in a thread of its own, if there is enough.

        A save that begins before the end takes what is ready.
        """
        num_chunks = num_bytes // CHUNK_SIZE + 1
        if num_bytes < _WORTH_TOUCHING:
            return

        def touch() -> None:
            import numpy as np  # Which lets training run meanwhile.
            import psutil

            if 2 * num_bytes > psutil.virtual_memory().available:
                return
            with contextlib.suppress(NoMemoryLeftError):  # The save will say so.
                while len(self._touched) < num_chunks and not self._end:
                    chunk = _allocate(CHUNK_SIZE)
                    np.frombuffer(chunk, np.uint8)[::PAGE_SIZE] = 0
                    self._touched.append(chunk)

        start_thread(
            threading.Thread(target=touch, name="elasticrun-memory", daemon=True)
        )

    def clear(self) -> None:
        """Forget what was captured; memory that the last save did not need is freed."""
        del self._chunks[-(-self._end // CHUNK_SIZE) :]
        if self._is_used:
            self._touched.clear()
        self._end, self._is_used = 0, True

    def capture(self, write: Callable[[BinaryIO], object]) -> tuple[memoryview, ...]:
        """Return what `write` puts into a stream, in blocks.

        What does not fit is a NoMemoryLeftError, whatever `write` has made of it.
        """
        self._end += -self._end % PAGE_SIZE  # Where a disk may fetch it from.
        begin = self._end
        write_through(ErrorKeepingWriter(self.append), write)
        return tuple(self._blocks(begin, self._end))

    def append(self, data: memoryview) -> None:
        """Copy bytes to the end of what is being captured."""
        if not data.nbytes:  # What has no elements cannot be cast.
            return
        data = data.cast("B")
        while data:
            room = self._room()
            size = min(len(room), len(data))
            _copy(room[:size], data[:size], num_threads=self.num_threads)
            self._end += size
            data = data[size:]

    def _room(self) -> memoryview:
        """Return what is free of the current chunk."""
        number, begin = divmod(self._end, CHUNK_SIZE)
        if number == len(self._chunks):
            is_ready = len(self._touched) > 0
            chunk = self._touched.popleft() if is_ready else _allocate(CHUNK_SIZE)
            self._chunks.append(chunk)
        return self._chunks[number][begin:]

    def _blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        while begin < end:
            number, offset = divmod(begin, CHUNK_SIZE)
            size = min(CHUNK_SIZE - offset, end - begin)
            yield self._chunks[number][offset : offset + size].toreadonly()
            begin += size


def _allocate(size: int) -> memoryview:
    try:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoMemoryLeftError(f"no {size} bytes: {error}") from error
    for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
        with contextlib.suppress(OSError):  # A kernel that was built without.
            chunk.madvise(advice)
    return memoryview(chunk)


def _copy(target: memoryview, source: memoryview, *, num_threads: int) -> None:
    if len(source) < _WORTH_THREADS:
        target[:] = source
        return
    import numpy as np  # Whose copies let other threads run.

    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    num_parts = max(1, min(num_threads, _MOST_THREADS))
    size = -(-len(source) // num_parts)
    parts = [slice(begin, begin + size) for begin in range(0, len(source), size)]
    threads = []
    for part in parts[1:]:
        thread = threading.Thread(target=np.copyto, args=(to[part], of[part]))
        if start_thread(thread):
            threads.append(thread)
        else:
            np.copyto(to[part], of[part])
    np.copyto(to[parts[0]], of[parts[0]])
    for thread in threads:
        thread.join()
