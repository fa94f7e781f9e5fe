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
_LOOK_SECONDS = 0.002


def publish(job: Job, name: str, settings: dict[str, Any]) -> None:
    """Let the other replicas know what this one has made."""
    if job.store is not None:
        job.store.put(_key(name, job.rank), settings)


def check_alike(job: Job, name: str) -> None:
    """Hear whether the replicas' loaders of this name are alike; rank 0 compares them.

    Raises:
        ValueError: They differ, which all replicas learn.
    """
    if job.store is None:
        return
    verdict = f"loader/{name}/verdict"
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        if job.rank == 0:
            text = _compare(job.store, name, job.world_size, deadline)
            job.store.put(verdict, text)
        else:  # None from a rank 0 that does not come to this loop.
            text = _find(job.store, verdict, deadline + _WAIT_SECONDS)
    except ConnectionError:
        return  # The next boundary says that rank 0 is gone.
    if text:
        raise ValueError(text)


def _compare(store: JobStore, name: str, world_size: int, deadline: float) -> str:
    """Return what is wrong with what the replicas have published, if anything."""
    expected = store.take(_key(name, 0))
    for rank in range(1, world_size):
        made = _find(store, _key(name, rank), deadline)
        if made is not None and made != expected:
            differences = "; ".join(
                f"{setting} is {value!r} on rank 0, but {made.get(setting)!r} on rank "
                f"{rank}"
                for setting, value in expected.items()
                if made.get(setting) != value
            )
            return (
                f"the replicas have made `{name}` differently: {differences}. Each "
                "takes its share of one order that all must know alike, so samples "
                "would be lost or seen twice. Make the same loaders on every replica, "
                "in the same order; none needs a seed or a part of the data of its own."
            )
    return ""


def _find(store: JobStore, key: str, deadline: float) -> Any:
    """Return what is published, or None: a client that waits blocks its other users."""
    while (found := store.find(key)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return found


def _key(name: str, rank: int) -> str:
    return f"loader/{name}/{rank}"
