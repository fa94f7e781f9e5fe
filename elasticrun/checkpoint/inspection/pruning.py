"""`elasticrun checkpoints prune`: removes old checkpoints, never the last good ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elasticrun.checkpoint.inspection.columns import size_text
from elasticrun.checkpoint.inspection.entries import (
    TORN,
    WRITING,
    Entry,
    InspectionError,
    find_entries,
    owner_of,
)
from elasticrun.checkpoint.inspection.overview import find_problems
from elasticrun.checkpoint.retention import RetentionPolicy
from elasticrun.checkpoint.storage.storage import Storage


def prune(
    storage: Storage, policy: RetentionPolicy, *, is_dry: bool, as_json: bool
) -> Iterator[str]:
    """Remove what is older than the newest checkpoints that are whole, by a rule.

    Whole means that every byte has been compared, so that a damaged one never stands
    for a good one. While a job uses the directory, what was never committed is left to
    it.

    Raises:
        InspectionError: The directory cannot be read, or nothing there has the value
            by which the best one is told.
        CheckpointError: It cannot be written.
        OSError: Something could not be removed.
    """
    with _kept_from_new_jobs(storage) as is_used:
        entries = find_entries(storage, is_used=is_used)
        to_remove = _choose_what_goes(entries, policy, is_used=is_used)
        for entry in to_remove:
            if not is_dry:
                storage.remove(entry.path.name)
            if not as_json:
                yield f"{'would remove' if is_dry else 'removed'} {entry.path.name}"
    size = sum(entry.size for entry in to_remove)
    if as_json:
        yield json.dumps(
            {
                "directory": str(storage.place),
                "removed": [entry.number for entry in to_remove],
                "size": size,
                "is_dry_run": is_dry,
            }
        )
    else:
        verb = "would free" if is_dry else "freed"
        yield f"{verb} {size_text(size)}" if to_remove else "nothing to remove"


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


def _choose_what_goes(
    entries: list[Entry], policy: RetentionPolicy, *, is_used: bool
) -> list[Entry]:
    committed = {e.number: e for e in entries if e.condition not in (WRITING, TORN)}

    def is_whole(number: int) -> bool:
        checkpoint = committed[number].checkpoint
        return checkpoint is not None and not find_problems(checkpoint)

    def value_of(number: int) -> float | None:
        checkpoint = committed[number].checkpoint
        if checkpoint is None or policy.best is None:
            return None
        return checkpoint.manifest.value_of(policy.best[0])

    if policy.best is not None:
        _check_known(policy.best[0], committed.values())
    stay = policy.choose(committed, is_good=is_whole, value_of=value_of)
    return [
        entry
        for entry in entries
        if entry.number not in stay and (entry.number in committed or not is_used)
    ]


def _check_known(name: str, entries: Iterable[Entry]) -> None:
    """Refuse a value that no checkpoint has: the best one would go with the others."""
    manifests = [e.checkpoint.manifest for e in entries if e.checkpoint is not None]
    names = {each for manifest in manifests for each in manifest.values}
    meant = {each for each in names if each.endswith(f".{name}")}
    if manifests and all(manifest.value_of(name) is None for manifest in manifests):
        has = f"they have {', '.join(sorted(names))}" if names else "they have none"
        raise InspectionError(
            f"no checkpoint here has a value {name!r}, by which the best could be "
            f"told ({has}), so the best would be removed with the others. Give "
            "--keep-best a name that they have, or leave it out."
        )
    if len(meant) > 1:
        raise InspectionError(
            f"--keep-best {name!r} is {' and '.join(sorted(meant))}. Give one of them."
        )
