"""Finds, lists and verifies the checkpoints in a directory.

It needs no torch: manifests are JSON, and checksums are of bytes. Only verifying reads
more than names, manifests and sizes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.draft import (
    Checkpoint,
    checkpoint_name,
    is_own,
    is_uncommitted,
    list_numbers,
    number_of,
    read_checkpoint,
)
from elasticrun.checkpoint.files.durable import DamagedFileError, StoreUnreachableError
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.storage.place import OwnerProcess, Place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.errors import CheckpointError

GOOD, BAD, WRITING, UNCOMMITTED = "good", "bad", "being written", "never committed"
NEWEST = "newest"
_HEAD = ("number", "time", "generation", "replicas", "size", "position", "condition")
_UNITS = ("KiB", "MiB", "GiB", "TiB")


class InspectionError(Exception):
    """What was asked for cannot be shown; the text says why."""


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
    if condition == BAD and is_uncommitted(storage, number):
        return None  # It was removed meanwhile.
    size = storage.measure_folder(name)
    return Entry(number, storage.locate(name), checkpoint, size, condition, reason)


def choose_checkpoint(storage: Storage, word: str) -> Checkpoint:
    """Return the checkpoint that `word` means: a number, or "newest"."""
    entry = _choose_entry(storage, word)
    if entry.checkpoint is None:
        raise InspectionError(entry.reason)
    return entry.checkpoint


def _choose_entry(storage: Storage, word: str) -> Entry:
    entries = [e for e in find_entries(storage) if e.condition in (GOOD, BAD)]
    if word == NEWEST:
        found = [each for each in entries if each.condition == GOOD]
        problem = "no checkpoint is good"
    elif word.isdecimal():
        found = [each for each in entries if each.number == int(word)]
        path = storage.locate(checkpoint_name(int(word)))
        problem = f"there is no checkpoint {path}"
    else:
        found = []
        problem = f"{word!r} is no checkpoint; give its number, or {NEWEST!r}"
    if not found:
        there = ", ".join(str(each.number) for each in reversed(entries)) or "none"
        raise InspectionError(f"{problem}. {storage.place} has {there}.")
    return found[0]


def choose_storage(word: str | None, *, configured: str | None) -> Storage:
    """Return what keeps the directory that is meant, by a word or without one."""
    given = word or configured
    if given is not None:
        return _storage_of(given)
    here = Path.cwd()
    candidates = [here]
    if not _holds_checkpoints(storage_at(here)):
        below = sorted(here.iterdir())
        candidates = [each for each in below if _holds_checkpoints(storage_at(each))]
    if not candidates:
        raise InspectionError(
            "there are no checkpoints here. Give the directory that holds them, or set "
            "ELASTICRUN_CHECKPOINT_DIR."
        )
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates)
        raise InspectionError(
            f"several directories here hold checkpoints: {names}. Give one of them."
        )
    return storage_at(candidates[0])


def _storage_of(given: str) -> Storage:
    storage = storage_at(given)
    place = storage.place
    # An object store has no directories: one without checkpoints is listed so.
    if isinstance(place, Path) and not os.path.isdir(place):
        raise InspectionError(
            f"{given}: there is no such directory. Give the directory that holds the "
            "checkpoints."
        )
    number = number_of(place.name)
    if number is not None and not _holds_checkpoints(storage):
        raise InspectionError(
            f"{place} is one checkpoint, not a directory of them. Give the directory "
            f"and the number: elasticrun checkpoints {place.parent} verify {number}"
        )
    return storage


def _holds_checkpoints(storage: Storage) -> bool:
    try:
        return any(is_own(storage, number) for number in list_numbers(storage))
    except OSError:
        return False


def list_checkpoints(storage: Storage, *, as_json: bool) -> Iterator[str]:
    """Yield the lines that say which checkpoints there are, the newest first."""
    entries, owner = find_entries(storage), owner_of(storage)
    if as_json:
        yield json.dumps(
            {
                "directory": str(storage.place),
                "in_use_by": str(owner) if owner else None,
                "checkpoints": [_entry_values(entry) for entry in entries],
            }
        )
        return
    yield f"{storage.place}{f', in use by {owner}' if owner else ''}"
    if entries:
        yield from columns([_HEAD, *map(_row, entries)], right=(0, 2, 3, 4))
    else:
        yield "no checkpoints"
    for entry in entries:
        if entry.reason:
            yield f"{entry.number} is bad: {entry.reason}"


def _entry_values(entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = {
        "number": entry.number,
        "path": str(entry.path),
        "condition": entry.condition,
        "reason": entry.reason,
        "size": entry.size,
    }
    if entry.checkpoint is not None:
        values |= manifest_values(entry.checkpoint)
    return values


def manifest_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint says of itself as plain values, without its files."""
    fields = json.loads(checkpoint.manifest.encode())
    return {key: fields[key] for key in fields.keys() - {"files", "crc32", "format"}}


def _row(entry: Entry) -> tuple[str, ...]:
    if entry.checkpoint is None:
        unknown = ("-",) * 3
        size = size_text(entry.size)
        return (str(entry.number), *unknown, size, "-", entry.condition)
    manifest = entry.checkpoint.manifest
    return (
        str(entry.number),
        time_text(manifest.time),
        str(manifest.generation),
        str(manifest.world_size),
        size_text(entry.size),
        position_text(manifest.position),
        entry.condition,
    )


def verify(storage: Storage, words: list[str]) -> Generator[str, None, int]:
    """Read every byte of checkpoints, and yield lines; return how many are damaged."""
    num_bad = 0
    entries = [_choose_entry(storage, word) for word in words]
    for entry in entries or find_entries(storage):
        problems = [entry.reason] if entry.condition == BAD else []
        if entry.checkpoint is not None:
            problems = find_problems(entry.checkpoint)
            if problems and is_uncommitted(storage, entry.number):
                continue  # The job has removed it meanwhile.
        elif not problems:  # It was never committed.
            continue
        num_bad += bool(problems)
        yield f"{entry.number}  {'bad' if problems else 'good'}"
        yield from (f"    {problem}" for problem in problems)
    return num_bad


def find_problems(checkpoint: Checkpoint) -> list[str]:
    """Return what is wrong with a checkpoint's files, after reading every byte."""
    problems = []
    for record in checkpoint.manifest.files:
        try:
            checkpoint.storage.verify(checkpoint.path.name, record)
        except StoreUnreachableError:  # That says nothing of the checkpoint.
            raise
        except (DamagedFileError, OSError) as error:
            problems.append(str(error))
    return problems


def columns(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Return lines in which the cells of all rows stand below one another."""
    table = [list(row) for row in rows]
    on_the_right = set(right)
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in on_the_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with three digits or so."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in _UNITS:
        value /= 1024
        if value < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:.{1 if value < 100 else 0}f} {unit}"


def time_text(seconds: float) -> str:
    """Return the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def position_text(values: Mapping[str, Any]) -> str:
    """Return the place in the program that a manifest gives."""
    if not values:
        return "-"
    try:
        return str(Position.decode(dict(values)))
    except CheckpointError:  # Not of a job's making.
        return ", ".join(f"{key} {value}" for key, value in values.items())
