"""The checkpoint directory for the launcher: newest checkpoint, end, moving aside."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from pathlib import Path

from elasticrun.checkpoint.listing import is_committed, list_numbers, read_counter
from elasticrun.checkpoint.storage.place import Place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.checkpoint.storage.storage import StoreUnreachableError
from elasticrun.errors import CheckpointError
from elasticrun.launcher.lock import locked
from elasticrun.launcher.options import OptionError, Program

_FINISHED = "finished.json"
_OWN = re.compile(
    r"checkpoint-[0-9]{8,}|generation|(launcher\.)?lock|finished\.json|logs|rendezvous"
    r"|events(\.old)?\.jsonl|log-files|streams|\w+(\.json)?\.tmp"
)


def newest_checkpoint(place: Place) -> int:
    """Return the number of the newest committed checkpoint, 0 if none is seen."""
    storage = storage_at(place)
    try:
        numbers = list_numbers(storage)
    except OSError:
        return 0
    return next((number for number in numbers if is_committed(storage, number)), 0)


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


def note_finished(place: Place, program: Program) -> None:
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
    """Give the directory another name, so that the job starts anew."""
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
    """Return a digest of the program's file and of its arguments."""
    digest = hashlib.sha256(
        json.dumps([program.kind, program.target, program.arguments]).encode()
    )
    if program.file is not None:
        digest.update(program.file.read_bytes())
    return digest.hexdigest()
