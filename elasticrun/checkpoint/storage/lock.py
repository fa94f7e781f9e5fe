"""The lock that keeps a second live job out of a checkpoint directory.

1. A start opens the file `lock`, or makes it; a link, or a file of another user, is
   refused.
2. It locks the open file (`F_OFD_SETLK`), waits for an owner that may be about to exit,
   and then writes its own name into the file.
3. Before each save it looks whether the file of that name is still the one it locked.
4. The kernel ends the lock with the process, and forks close the file.
"""

from __future__ import annotations

import fcntl
import grp
import io
import json
import os
import pwd
import stat
import struct
import time
import weakref
from dataclasses import asdict
from pathlib import Path

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import identity_of, open_plain
from elasticrun.checkpoint.storage.place import OwnerProcess, Place
from elasticrun.errors import CheckpointError, CheckpointWarning, warn_at_program

POLL_INTERVAL = 0.05
# In the text of errors that end the job: the launcher starts no replicas after them.
ENDS_JOB = "two jobs would mix their checkpoints, so this one stops without saving"
_LARGEST_LOCK = 4096  # Bytes; one that is larger is not elasticrun's.


# This process's locks, which a fork would inherit.
_held: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


class DirectoryLock:
    """A lock on the file `lock` in a directory, which names its owner.

    It belongs to the open file: a second one is refused in this process, too, and
    nothing is lost when the program opens and closes the file itself, to copy the
    directory for instance. It ends with the process however that ends, and no forked
    child keeps it: a DataLoader worker which outlives a killed replica blocks nobody.
    The file stays: removing it would let two processes lock two files of one name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file: io.FileIO | None = None

    def acquire(self, *, timeout: float) -> None:
        """Make the directory and take its lock."""
        try:
            durable.make_directory(self.directory)
            durable.check_writable(self.directory)
            if found := find_others_who_can_write(self.directory):
                warn_at_program(
                    f"{found} Whoever can change a checkpoint decides what the job "
                    "computes.",
                    CheckpointWarning,
                )
            self._file = self._wait_for_lock(time.monotonic() + timeout)
        except LockedError as error:
            raise in_use_error(self.directory, error) from error
        except (OSError, ValueError) as error:
            what_to_do = (
                "Make that directory writable"
                if isinstance(error, OSError)
                else f"Remove what is in the place of {self.directory / 'lock'}"
            )
            raise CheckpointError(
                f"{self.directory} cannot hold this job's checkpoints: "
                f"{str(error).rstrip('.')}. Nothing could be saved, so the job would "
                f"lose its work when it is stopped. {what_to_do}, or give the job "
                "another one (ELASTICRUN_CHECKPOINT_DIR)."
            ) from error

    def _wait_for_lock(self, deadline: float) -> io.FileIO:
        while True:
            try:
                return lock_file(self.directory / "lock")
            except LockedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_INTERVAL)

    def check(self) -> None:
        """Refuse to go on where another process may have taken the directory.

        Nothing to check without the lock: who has none only looks, or tidies up.
        """
        if self._file is None or self._file.closed:
            return
        path = self.directory / "lock"
        try:
            found: tuple[int, int] | None = identity_of(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found != identity_of(os.fstat(self._file.fileno())):
            how = "is gone" if found is None else "is another file now"
            raise CheckpointError(
                f"{path}, which this job has locked, {how}: the directory was removed "
                "or replaced while the job used it. Another job may use it now, and "
                f"{ENDS_JOB}. Start it again with a directory of its own "
                "(ELASTICRUN_CHECKPOINT_DIR)."
            )

    def release(self) -> None:
        """Give the lock back; it may be free already."""
        if self._file is None or self._file.closed:  # Closed in a fork.
            return
        self._file.close()
        self._file = None


def find_owner(directory: Path) -> OwnerProcess | None:
    """Return who uses the directory now, without taking its lock."""
    path = directory / "lock"
    try:
        with io.FileIO(open_plain(str(path), os.O_RDONLY | os.O_CLOEXEC)) as file:
            # Shared with other readers; given back when the file is closed, long
            # before an owner that begins just now has tired of waiting.
            _lock_open_file(file, fcntl.F_RDLCK)
    except LockedError as error:
        return error.owner or OwnerProcess("an unknown host", 0, 0.0, "just now")
    except (FileNotFoundError, ValueError):  # No job locks a pipe, or by a link.
        return None
    return None


class LockedError(Exception):
    """Somebody holds the lock; the text says who."""

    def __init__(self, owner: OwnerProcess | None) -> None:
        self.owner = owner
        super().__init__(str(owner or "a process that has not yet written its name"))


def in_use_error(place: Place, owner: object) -> CheckpointError:
    """Return the error for a place that another job has."""
    return CheckpointError(
        f"{place} is in use by a live job ({owner}). Two jobs in one directory would "
        "remove each other's checkpoints. Stop that job or wait for its end, or give "
        "this one a directory of its own (ELASTICRUN_CHECKPOINT_DIR)."
    )


def find_others_who_can_write(directory: Path) -> str:
    """Return who else can write to a directory, and what ends that; or nothing."""
    status = os.stat(directory)
    if status.st_mode & stat.S_IWOTH:
        who, right = "everybody", "o-w"
    elif status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        who, right = f"the group {_group_name(status.st_gid)}", "g-w"
    else:
        return ""
    return (
        f"{directory} can be written to by {who} (mode "
        f"{stat.S_IMODE(status.st_mode):o}). Remove that right: chmod {right} "
        f"{directory}."
    )


def _is_private(group: int) -> bool:
    """Return whether it is the group of this user alone, which many systems make."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:  # It has no name.
        return False
    return found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def lock_file(path: Path, *, is_shared: bool = False) -> io.FileIO:
    """Open a file and lock it until it is closed; its owner stands in it.

    Args:
        is_shared: Whether others may share the lock.
    """
    file = durable.open_shared(path)
    try:
        _lock_open_file(file, fcntl.F_RDLCK if is_shared else fcntl.F_WRLCK)
        if not is_shared:
            owner = asdict(OwnerProcess.this_process())
            durable.overwrite(file, json.dumps(owner).encode() + b"\n")
    except BaseException:
        file.close()
        raise
    _held.add(file)
    return file


def _lock_open_file(file: io.FileIO, kind: int) -> None:
    # C's `struct flock`: type, whence, start, length, process; zeros mean all of it.
    whole_file = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
    except (BlockingIOError, PermissionError) as error:
        # EAGAIN or EACCES, as POSIX leaves open.
        raise LockedError(_read_owner(file)) from error


def _forget_in_child() -> None:
    """Close what a fork has inherited; the parent's open files stay locked."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _read_owner(file: io.FileIO) -> OwnerProcess | None:
    try:
        return OwnerProcess(**json.loads(file.read(_LARGEST_LOCK)))
    except (ValueError, TypeError, RecursionError):  # just taken, not yet written
        return None
