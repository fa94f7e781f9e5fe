"""Files that this process has open for writing, where the system lists them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def find_open_for_writing(directory: Path, names: list[str]) -> str | None:
    """Return the first of these files that this process may still write into.

    Where the system does not list a process's open files, none is found.

    Raises:
        OSError: A file is not there.
    """
    being_written = set()
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # It has just been closed.
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                being_written.add(_identity(os.fstat(descriptor)))
    for name in names:
        status = os.stat(directory / name, follow_symlinks=False)
        if _identity(status) in being_written:
            return name
    return None


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return []


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
