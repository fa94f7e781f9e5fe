"""Replaces a file that other processes may replace at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import (
    TEMPORARY_SUFFIX,
    ErrorKeepingWriter,
    fsync_directory,
    open_plain,
    write_through,
)

_LONGEST = 200  # Bytes of a name, so that the temporary one fits into 255.


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file durably by what `write` puts into a stream.

    A crash or an error leaves the old content or the new, or no file if there was
    none. Several may write at once, and each result is whole. The mode of a file that
    is there is kept, also while its successor is written, and a link stays a link.
    """
    path = Path(os.path.realpath(path))
    mode = _mode_of_file(path)
    _remove_leftovers(path)
    temporary, file = _open_temporary(path, is_private=mode is not None)
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            write_through(ErrorKeepingWriter(file.write), write)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # A full disk names none.
        raise
    fsync_directory(path.parent)


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
    mode = 0o600 if is_private else 0o666
    while True:
        name = f"{_prefix(path)}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        temporary = path.with_name(name)
        file = open(  # noqa: SIM115 (the caller closes it)
            temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)
        )
        # Somebody who clears leftovers away may have been faster than the lock.
        if _lock(file, fcntl.LOCK_EX) is None or os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _prefix(path: Path) -> str:
    """Return how the names of temporary files for this one begin."""
    return f".{os.fsencode(path.name)[:_LONGEST].decode(errors='ignore')}."


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of this file have left: nobody locks it any more."""
    prefix, suffix = re.escape(_prefix(path)), re.escape(TEMPORARY_SUFFIX)
    leftover = re.compile(f"{prefix}[0-9a-f]{{16}}{suffix}")
    for name in filter(leftover.fullmatch, os.listdir(path.parent)):
        with (
            contextlib.suppress(OSError, ValueError),
            open(path.with_name(name), "rb", opener=open_plain) as file,
        ):
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
