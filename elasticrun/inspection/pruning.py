"""`elasticrun checkpoints prune`: removes old checkpoints, never the last good ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from elasticrun.checkpoint.keeping import Keeping
from elasticrun.checkpoint.storage import Storage
from elasticrun.inspection.entries import (
    TORN,
    WRITING,
    Entry,
    find_entries,
    owner_of,
)
from elasticrun.inspection.overview import find_problems
from elasticrun.inspection.tables import size_text


def prune(
    storage: Storage, keeping: Keeping, *, is_dry: bool, as_json: bool
) -> Iterator[str]:
    """Remove what is older than the newest checkpoints that are whole, by a rule.

    Whole means that every byte has been compared, so that a damaged one never stands
    for a good one. While a job uses the directory, what was never committed is left to
    it.

    Raises:
        InspectionError: The directory cannot be read.
        CheckpointError: It cannot be written.
        OSError: Something could not be removed.
    """
    with _kept_from_new_jobs(storage) as is_used:
        entries = find_entries(storage, is_used=is_used)
        doomed = _choose_doomed(entries, keeping, is_used=is_used)
        for entry in doomed:
            if not is_dry:
                storage.remove(entry.path.name)
            if not as_json:
                yield f"{'would remove' if is_dry else 'removed'} {entry.path.name}"
    size = sum(entry.size for entry in doomed)
    if as_json:
        yield json.dumps(
            {
                "directory": str(storage.place),
                "removed": [entry.number for entry in doomed],
                "size": size,
                "is_dry_run": is_dry,
            }
        )
    else:
        verb = "would free" if is_dry else "freed"
        yield f"{verb} {size_text(size)}" if doomed else "nothing to remove"


@contextmanager
def _kept_from_new_jobs(storage: Storage) -> Iterator[bool]:
    """Hold the lock or the claim, so that no job begins with what is being removed.

    Yields:
        Whether a job has the directory already.
    """
    if owner_of(storage) is not None:
        yield True
        return
    storage.acquire(timeout=0)
    try:
        yield False
    finally:
        storage.release()


def _choose_doomed(
    entries: list[Entry], keeping: Keeping, *, is_used: bool
) -> list[Entry]:
    committed = {e.number: e for e in entries if e.condition not in (WRITING, TORN)}

    def is_whole(number: int) -> bool:
        checkpoint = committed[number].checkpoint
        return checkpoint is not None and not find_problems(checkpoint)

    def value_of(number: int) -> float | None:
        checkpoint = committed[number].checkpoint
        if checkpoint is None or keeping.best is None:
            return None
        return checkpoint.manifest.values.get(keeping.best[0])

    stay = keeping.choose(committed, is_good=is_whole, value_of=value_of)
    return [
        entry
        for entry in entries
        if entry.number not in stay and (entry.number in committed or not is_used)
    ]
