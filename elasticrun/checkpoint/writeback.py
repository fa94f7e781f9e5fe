"""Asking the kernel to begin to write a file to the disk, while more of it comes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing.


def begin_writeback(descriptor: int, offset: int, size: int) -> None:
    """Let the disk work on these bytes already; where that cannot be said, it waits.

    This promises nothing: only `fsync` forces a file to the disk.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, size, _WRITE)


def _find() -> Callable[[int, int, int, int], Any] | None:
    function: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it.
    if function is not None:
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_uint,
        )
    return function  # type: ignore[no-any-return]


_sync_file_range = _find()
