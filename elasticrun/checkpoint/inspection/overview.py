"""`elasticrun checkpoints list` and `verify`: which exist, and which are intact.

Needs no torch: manifests are JSON, and checksums are of bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint, is_uncommitted
from elasticrun.checkpoint.files.durable import DamagedFileError, StoreUnreachableError
from elasticrun.checkpoint.inspection.entries import (
    BAD,
    DamagedCheckpointError,
    Entry,
    choose_checkpoint,
    find_entries,
    owner_of,
)
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.errors import CheckpointError

_HEAD = ("number", "time", "generation", "replicas", "size", "position", "condition")
_UNITS = ("KiB", "MiB", "GiB", "TiB")


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
    for number, problems in _problems_of(storage, words):
        num_bad += bool(problems)
        yield f"{number}  {'bad' if problems else 'good'}"
        yield from (f"    {problem}" for problem in problems)
    return num_bad


def _problems_of(storage: Storage, words: list[str]) -> Iterator[tuple[int, list[str]]]:
    for word in words:
        try:
            checkpoint = choose_checkpoint(storage, word)
        except DamagedCheckpointError as error:
            yield error.number, [str(error)]
        else:
            yield checkpoint.number, find_problems(checkpoint)
    for entry in () if words else find_entries(storage):
        if entry.checkpoint is not None:
            problems = find_problems(entry.checkpoint)
            # The job may have removed it meanwhile.
            if not (problems and is_uncommitted(storage, entry.number)):
                yield entry.number, problems
        elif entry.condition == BAD:
            yield entry.number, [entry.reason]


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
