"""The launcher's lock of a checkpoint directory, for as long as its job lives.

Replicas hold the file `lock` while they train. The launcher holds `launcher.lock`, also
between generations, so that nobody else begins there meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.recorded import open_plain
from elasticrun.checkpoint.storage.lock import find_owner
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

    Raises:
        OptionError: A live job uses it, or it cannot be written.
    """
    make_usable(directory, what="checkpoints", option="--checkpoint-dir")
    descriptor = _lock(directory, is_shared=is_shared)
    try:
        if not is_shared:
            _wait_for_replicas(directory)
        yield
    finally:
        os.close(descriptor)


def make_usable(directory: Path, *, what: str, option: str) -> None:
    """Make a directory, or refuse it before anything is started.

    Raises:
        OptionError: It cannot be made, or not be written.
    """
    try:
        durable.make_directory(directory)
        durable.check_writable(directory)
    except OSError as error:
        raise OptionError(
            f"{directory} cannot hold this job's {what}: {error.strerror}. Make it a "
            f"writable directory, or give another {option}."
        ) from error


def _lock(directory: Path, *, is_shared: bool) -> int:
    """Return the open file with the lock; closing it, or dying, gives it back."""
    path = directory / _NAME
    while True:
        try:
            descriptor = open_plain(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise OptionError(
                f"{directory} cannot hold this job's checkpoints: {reason} "
                f"({_NAME}). Give another --checkpoint-dir."
            ) from error
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        try:
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                owner = _read_owner(descriptor)
                os.close(descriptor)
                raise _refusal(directory, owner) from error
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # Somebody has just moved the directory aside.
        durable.make_directory(directory)
    if not is_shared:
        _write_owner(descriptor)
    return descriptor


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
        f"a live job uses {directory} ({owner}). Each would take the other's "
        "checkpoints for its own. Stop that job first, or give this one another "
        "--checkpoint-dir."
    )


def _is_still(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _write_owner(descriptor: int) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # A full disk: nobody will read who it is.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its process is not known"
