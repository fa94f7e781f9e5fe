"""Files that a program has left open: what was written to them is not lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import sys
from typing import Any


def flush_files() -> None:
    """Write out what waits in this process's buffers, also in those of C."""
    for file in [*_open_files(), *_standard_streams()]:
        with contextlib.suppress(Exception):  # It goes on with the others.
            file.flush()
    ctypes.CDLL(None).fflush(None)


def close_files() -> None:
    """Close what is open but for the standard streams, as Python does at its end.

    So compressed files get their last bytes, too.
    """
    flush_files()
    streams = _standard_streams()
    kept = [*streams, *(getattr(each, "buffer", None) for each in streams)]
    for file in _open_files():
        if not any(file is each for each in kept):
            with contextlib.suppress(Exception):  # Python says nothing, either.
                file.close()


def _standard_streams() -> list[Any]:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return [each for each in streams if each is not None]


def _open_files() -> list[io.IOBase]:
    """Return what buffers, what writes into another one before that."""
    # By type: objects that stand for others answer for these, or raise.
    files: list[Any] = [
        each for each in gc.get_objects() if issubclass(type(each), io.IOBase)
    ]
    inner = (io.BufferedWriter, io.BufferedRandom)
    texts = [each for each in files if isinstance(each, io.TextIOWrapper)]
    others = [
        each
        for each in files
        if not isinstance(each, (io.TextIOWrapper, *inner, io.FileIO))
    ]
    return [*texts, *others, *(each for each in files if isinstance(each, inner))]
