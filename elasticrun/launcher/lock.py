"""The launcher's lock on a checkpoint directory, held as long as its job lives.

Replicas lock the file `lock` while they train. The launcher locks `launcher.lock`, also
between generations, so that no other job can begin there.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.storage.lock import (
    LockedError,
    find_others_who_can_write,
    find_owner,
    lock_file,
)
from elasticrun.launcher.options import OptionError

_NAME = "launcher.lock"
_REPLICAS_END_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(directory: Path, *, is_shared: bool) -> Iterator[None]:
    """Make the directory, and keep other jobs out of it.

    Args:
        is_shared: For a job on many machines: their launchers share the lock, and a
            replica may hold its own already.
    """
    make_usable(directory, what="checkpoints", option="--checkpoint-dir")
    with _lock(directory, is_shared=is_shared) or contextlib.nullcontext():
        if not is_shared:
            _wait_for_replicas(directory)
        yield


def find_locked_by(pid: int) -> Path | None:
    """Return the directory that a launcher of this user has locked, None if unknown."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # It was closed just now.
            path = link.readlink()
            if path.name == _NAME:
                return path.parent
    return None


def make_usable(directory: Path, *, what: str, option: str) -> None:
    """Make a directory, or refuse it before anything is started."""
    try:
        durable.make_directory(directory)
        durable.check_writable(directory)
    except OSError as error:
        raise OptionError(
            f"{directory} cannot hold this job's {what}: {error.strerror}. Make it a "
            f"writable directory, or give another {option}."
        ) from error


def check_meeting_place(directory: Path) -> None:
    """Refuse to meet where another user could write an address for the others.

    torch unpickles what the store at that address holds.
    """
    found = find_others_who_can_write(directory)
    for each in (directory, directory / "rendezvous"):
        with contextlib.suppress(FileNotFoundError):
            owner = os.stat(each).st_uid
            if owner not in (os.geteuid(), 0):
                found = f"{each} belongs to user {owner}."
    if found:
        raise OptionError(
            f"--nodes: {found} Who writes there can have all machines run code, for "
            "they find each other through it. Or say where they meet: --rdzv-endpoint "
            "HOST:PORT."
        )


def _lock(directory: Path, *, is_shared: bool) -> io.FileIO | None:
    """Return the open file with the lock; None where nothing can be locked."""
    path = directory / _NAME
    while True:
        try:
            file = lock_file(path, is_shared=is_shared)
        except LockedError as error:
            raise _refusal(directory, str(error)) from error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
                return None
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise OptionError(
                f"{directory} cannot hold this job's checkpoints: {reason} "
                f"({_NAME}). Give another --checkpoint-dir."
            ) from error
        if _is_still(path, file):
            return file
        file.close()  # Somebody has just moved the directory aside.
        durable.make_directory(directory)


def _wait_for_replicas(directory: Path) -> None:
    """Wait a moment for replicas whose launcher was killed: they end after it."""
    deadline = time.monotonic() + _REPLICAS_END_SECONDS
    with contextlib.suppress(OSError):  # Where nothing can be locked, nobody has.
        while (owner := find_owner(directory)) is not None:
            if time.monotonic() > deadline:
                raise _refusal(directory, str(owner))
            time.sleep(_LOOK_SECONDS)


def _refusal(directory: Path, owner: str) -> OptionError:
    return OptionError(
        f"another job is running with {directory} ({owner}). Each of the two would "
        "load the other's checkpoints. Stop that job first, or give this one another "
        "--checkpoint-dir."
    )


def _is_still(path: Path, file: io.FileIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False
