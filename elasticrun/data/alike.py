"""Whether all replicas have made a loader alike, which they compare at its first loop.

Each shares out the order by itself, so that loaders which differ would lose samples.
Not a collective: a loader of one replica alone, which is never looped by all, is no
mistake.
"""

from __future__ import annotations

import time
from typing import Any

from elasticrun.control.store import JobStore
from elasticrun.job import Job

_WAIT_SECONDS = 5.0  # For a replica that is yet to make the loader, if it ever does.
_LOOK_SECONDS = 0.02


def publish(job: Job, name: str, settings: dict[str, Any]) -> None:
    """Let the other replicas know what this one has made."""
    if job.store is not None:
        job.store.put(_key(name, job.rank), settings)


def check_alike(job: Job, name: str) -> None:
    """Compare a loader with those of its name on other replicas.

    Raises:
        ValueError: They differ, which all replicas learn.
    """
    if job.store is None:
        return
    deadline = time.monotonic() + _WAIT_SECONDS
    made: dict[int, dict[str, Any]] = {}
    try:
        for rank in range(job.world_size):
            settings = _find(job.store, _key(name, rank), deadline)
            if settings is not None:
                made[rank] = settings
    except ConnectionError:
        return  # The next boundary says that rank 0 is gone.
    first, *others = made
    for rank in others:
        if made[rank] != made[first]:
            raise ValueError(
                f"the replicas have made `{name}` differently: "
                f"{_differences(made, first, rank)}. Each takes its share of one order "
                "that all must know alike, so samples would be lost or seen twice. "
                "Make the same loaders on every replica, in the same order; none needs "
                "a seed or a part of the data of its own."
            )


def _find(store: JobStore, key: str, deadline: float) -> dict[str, Any] | None:
    while (found := store.find(key)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return found


def _key(name: str, rank: int) -> str:
    return f"loader/{name}/{rank}"


def _differences(made: dict[int, dict[str, Any]], one: int, other: int) -> str:
    return "; ".join(
        f"{setting} is {value!r} on rank {one}, but {made[other].get(setting)!r} on "
        f"rank {other}"
        for setting, value in made[one].items()
        if made[other].get(setting) != value
    )
