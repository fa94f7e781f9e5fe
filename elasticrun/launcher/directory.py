"""The checkpoint directory for the launcher: its lock, what is there, moving aside.

Replicas lock the file `lock` while they train. The launcher locks `launcher.lock`, also
between generations, so that no other job can begin there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from elasticrun.checkpoint.draft import (
    checkpoint_name,
    is_committed,
    list_numbers,
    read_checkpoint,
    read_counter,
)
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import StoreUnreachableError
from elasticrun.checkpoint.storage.lock import (
    LockedError,
    find_others_who_can_write,
    find_owner,
    lock_file,
)
from elasticrun.checkpoint.storage.place import Place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.errors import CheckpointError, text_of
from elasticrun.launcher.options import OptionError, Program

_FINISHED = "finished.json"
_OWN = re.compile(
    r"checkpoint-[0-9]{8,}|generation|(launcher\.)?lock|finished\.json|logs|rendezvous"
    r"|events(\.old)?\.jsonl|log-files|streams|\w+(\.json)?\.tmp"
)
_NAME = "launcher.lock"
_REPLICAS_END_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(directory: Path, *, is_shared: bool) -> Iterator[Callable[[], str]]:
    """Make the directory, and keep other jobs out of it.

    Yields what tells how the directory was lost, in words; nothing if it was not.

    Args:
        is_shared: For a job on many machines: their launchers share the lock, and a
            replica may hold its own already.
    """
    make_usable(directory, what="checkpoints", option="--checkpoint-dir")
    with _lock(directory, is_shared=is_shared) or contextlib.nullcontext() as file:
        if not is_shared:
            _wait_for_replicas(directory)
        yield partial(_find_loss, directory / _NAME, file)


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


def _find_loss(path: Path, file: io.FileIO | None) -> str:
    with contextlib.suppress(OSError):  # Replicas will find out what it has.
        if file is not None and not _is_still(path, file):
            return (
                f"{path}, which this launcher has locked, is gone or another file: the "
                "directory was moved, removed or replaced while the job used it, and "
                "another job may use it now. So the job is not started again there. "
                "Move the directory back, or give --checkpoint-dir where it is now, "
                "and start the job again"
            )
    return ""


def _is_still(path: Path, file: io.FileIO) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False


def newest_checkpoint(place: Place) -> int:
    """Return the number of the newest committed checkpoint, 0 if none is seen."""
    storage = storage_at(place)
    try:
        numbers = list_numbers(storage)
    except OSError:
        return 0
    return next((number for number in numbers if is_committed(storage, number)), 0)


def force_newest(directory: Path, say: Callable[[str], object]) -> None:
    """Force the newest checkpoint to the disk if it was left to replicas to come.

    Args:
        say: Told before, for that may take long, and if it fails. Whoever is killed
            meanwhile leaves it to the next start.
    """
    storage, newest = storage_at(directory), newest_checkpoint(directory)
    name = checkpoint_name(newest)
    try:
        if newest and storage.is_unforced(name):
            say(f"forcing checkpoint {newest} to the disk")
            storage.force(name, read_checkpoint(storage, newest).names())
    except (OSError, CheckpointError) as error:
        say(
            f"checkpoint {newest} may not survive a power cut, since it could not be "
            f"forced to the disk: {text_of(error)}. The next start tries again"
        )


def check_reachable(place: Place) -> None:
    """Refuse an object store that cannot be asked, before anything is started."""
    if isinstance(place, Path):  # Its lock will say what is wrong with it.
        return
    try:
        storage_at(place).list_names()
    except StoreUnreachableError as error:
        raise OptionError(
            f"cannot find out what is in {place}: {error}. A job that starts without "
            "it would lose what was trained. Make sure that the store can be reached, "
            "or give another --checkpoint-dir."
        ) from error


def next_generation(place: Place) -> int:
    """Return the number that the directory's next generation will get."""
    try:
        return read_counter(storage_at(place), "generation") + 1
    except OSError:  # The replicas will find out, and say so.
        return 0


def write_finished(place: Place, program: Program) -> None:
    """Remember that this program has come to its end with the newest checkpoint."""
    newest = newest_checkpoint(place)
    if newest:
        note = {
            "program": _fingerprint(program),
            "checkpoint": newest,
            "time": time.time(),
        }
        with contextlib.suppress(OSError):  # Without it a start takes longer to end.
            storage_at(place).replace(_FINISHED, json.dumps(note).encode())


def finished_at(place: Place, program: Program) -> float | None:
    """Return when this program came to its end here, None if it has not.

    With a newer checkpoint than it ended with, it has gone on since.
    """
    try:
        note = json.loads(storage_at(place).read(_FINISHED))
        is_same = note["program"] == _fingerprint(program)
        is_newest = note["checkpoint"] == newest_checkpoint(place)
        return float(note["time"]) if is_same and is_newest else None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def move_aside(place: Place) -> Path | None:
    """Rename the directory, if there is one, so that the job starts anew."""
    if not isinstance(place, Path):
        raise OptionError(
            f"--fresh would move {place} aside, but in an object store nothing can be "
            "renamed. Give a new --checkpoint-dir, or remove the old files yourself."
        )
    if not place.exists():
        return None
    strange = sorted(name for name in os.listdir(place) if not _OWN.fullmatch(name))
    if strange:
        raise OptionError(
            f"--fresh would move {place} aside, but it holds {strange[0]!r}, which "
            "elasticrun did not write. Move the directory yourself, or give another "
            "--checkpoint-dir."
        )
    with locked(place, is_shared=False):
        others = (place.with_name(f"{place.name}.old-{n}") for n in itertools.count(1))
        target = next(other for other in others if not other.exists())
        place.rename(target)
    return target


def _fingerprint(program: Program) -> str:
    digest = hashlib.sha256(
        json.dumps([program.kind, program.target, program.arguments]).encode()
    )
    if program.file is not None:
        digest.update(program.file.read_bytes())
    return digest.hexdigest()
