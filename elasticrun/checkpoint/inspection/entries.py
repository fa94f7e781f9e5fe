"""Lists the checkpoints in a directory with their conditions, and finds one.

It reads only names, manifests and sizes, so it is quick and needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrun.checkpoint.draft import (
    Checkpoint,
    checkpoint_name,
    is_own,
    is_uncommitted,
    list_numbers,
    number_of,
    read_checkpoint,
)
from elasticrun.checkpoint.storage.place import OwnerProcess, Place, parse_place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.errors import CheckpointError

GOOD, BAD, WRITING, UNCOMMITTED = "good", "bad", "being written", "never committed"
NEWEST = "newest"


class InspectionError(Exception):
    """What was asked for cannot be shown; the text says why."""


class DamagedCheckpointError(InspectionError):
    """What was asked for is there, and nobody can read it."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Entry:
    """One checkpoint as it was found.

    Attributes:
        checkpoint: None if there is no manifest that can be read.
        size: The bytes of its files, as they are on the disk.
        condition: GOOD as far as sizes tell, BAD, WRITING or UNCOMMITTED.
    """

    number: int
    path: Place
    checkpoint: Checkpoint | None
    size: int
    condition: str
    reason: str = ""


def find_entries(storage: Storage) -> list[Entry]:
    """Return what a directory or an object store holds, the newest first."""
    try:
        # Then the newest may be about to be written.
        is_used = owner_of(storage) is not None
        found: list[Entry] = []
        for number in list_numbers(storage):
            entry = _look_at(storage, number, may_be_written=is_used and not found)
            if entry is not None:
                found.append(entry)
    except OSError as error:
        raise InspectionError(f"{storage.place} cannot be read: {error}") from error
    return found


def owner_of(storage: Storage) -> OwnerProcess | None:
    """Return who uses the directory, None if nobody does or it cannot be told."""
    try:
        return storage.find_owner()
    except OSError:
        return None


def _look_at(storage: Storage, number: int, *, may_be_written: bool) -> Entry | None:
    """Return what is there; None if the job has removed it since it was listed."""
    name, checkpoint = checkpoint_name(number), None
    condition, reason = GOOD, ""
    try:
        checkpoint = read_checkpoint(storage, number)
        checkpoint.check_sizes()
    except FileNotFoundError:
        if not storage.is_draft(name):  # Somebody else's, or just removed.
            return None
        condition = WRITING if may_be_written else UNCOMMITTED
    except (CheckpointError, OSError) as error:
        condition, reason = BAD, str(error)
    if condition == BAD and is_uncommitted(
        storage, number
    ):  # It was removed meanwhile.
        return None
    size = storage.measure_folder(name)
    return Entry(number, storage.locate(name), checkpoint, size, condition, reason)


def choose_checkpoint(storage: Storage, word: str) -> Checkpoint:
    """Return the checkpoint that `word` means: a number, "newest", a path or a URL."""
    if word == NEWEST:
        return _newest(storage)
    try:
        its_storage, number = _find(storage, word)
        path = its_storage.locate(checkpoint_name(number))
    except ValueError as error:
        raise InspectionError(
            f"{word!r} is no checkpoint; give its number, {NEWEST!r}, or the path of "
            f"its directory. {_say_what_there_is(storage)}"
        ) from error
    try:
        return read_checkpoint(its_storage, number)
    except FileNotFoundError as error:
        raise InspectionError(
            f"there is no checkpoint {path}. {_say_what_there_is(storage)}"
        ) from error
    except CheckpointError as error:
        raise DamagedCheckpointError(number, str(error)) from error


def _find(storage: Storage, word: str) -> tuple[Storage, int]:
    """Return where a checkpoint is, by its number there or by its own path or URL."""
    if word.isdecimal():
        return storage, int(word)
    place = parse_place(word)
    number = number_of(place.name)
    if number is None:
        raise ValueError(f"{word} is not named like a checkpoint")
    return storage_at(place.parent), number


def _newest(storage: Storage) -> Checkpoint:
    for entry in find_entries(storage):
        if entry.checkpoint is not None and entry.condition == GOOD:
            return entry.checkpoint
    raise InspectionError(f"{storage.place} has no good checkpoint.")


def _say_what_there_is(storage: Storage) -> str:
    numbers = [e.number for e in find_entries(storage) if e.checkpoint is not None]
    if not numbers:
        return f"{storage.place} has none."
    return f"{storage.place} has {', '.join(map(str, sorted(numbers)))}."


def choose_storage(word: str | None, *, configured: str | None) -> Storage:
    """Return what keeps the directory that is meant, by a word or without one."""
    given = word or configured
    if given is not None:
        storage = storage_at(given)
        # An object store has no directories: one without checkpoints is listed so.
        if isinstance(storage.place, Path) and not os.path.isdir(storage.place):
            raise InspectionError(
                f"{given}: there is no such directory. Give the directory that holds "
                "the checkpoints."
            )
        _refuse_checkpoint(storage)
        return storage
    here = Path.cwd()
    candidates = [here]
    if not _holds_checkpoints(storage_at(here)):
        below = sorted(here.iterdir())
        candidates = [each for each in below if _holds_checkpoints(storage_at(each))]
    if len(candidates) == 1:
        return storage_at(candidates[0])
    raise InspectionError(_say_which(candidates))


def _refuse_checkpoint(storage: Storage) -> None:
    """Raise for one checkpoint in the place of the directory that holds it."""
    place = storage.place
    number = number_of(place.name)
    if number is not None and not _holds_checkpoints(storage):
        raise InspectionError(
            f"{place} is one checkpoint, not a directory of them. Give the directory "
            f"and the number: elasticrun checkpoints {place.parent} verify {number}"
        )


def _holds_checkpoints(storage: Storage) -> bool:
    try:
        return any(is_own(storage, number) for number in list_numbers(storage))
    except OSError:
        return False


def _say_which(candidates: Sequence[Path]) -> str:
    if not candidates:
        return (
            "there are no checkpoints here. Give the directory that holds them, or set "
            "ELASTICRUN_CHECKPOINT_DIR."
        )
    names = ", ".join(path.name for path in candidates)
    return f"several directories here hold checkpoints: {names}. Give one of them."
