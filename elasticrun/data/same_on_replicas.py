"""Compares a loader between all replicas, at its first loop.

Each replica computes its own share of the order, so samples would be lost if loaders
differed. The comparison is no collective, since some replicas may never loop over a
loader: nobody waits long, and a replica that comes later compares its loader with rank
0's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elasticrun.job.job import Job
from elasticrun.replicas.exchange import loader_made

# For a replica that is yet to make the loader, if it ever does: so that all say why the
# job ends, and not only the one that comes last.
_WAIT_SECONDS = 5.0


def publish(job: Job, name: str, settings: dict[str, Any]) -> None:
    """Let the other replicas know what this one has made."""
    job.exchange.tell(loader_made(name), settings)


def check_same_on_replicas(job: Job, name: str, settings: dict[str, Any]) -> None:
    """Check that the replicas' loaders of this name are alike; rank 0 compares them."""
    if job.world_size == 1:
        return
    exchange, topic = job.exchange, loader_made(name)
    try:
        if job.rank == 0:
            heard = exchange.gather(topic, settings, timeout=_WAIT_SECONDS)
            text = _compare(name, heard.by_rank)
            exchange.say(topic, {"made": settings, "text": text})
        else:
            said = exchange.hear(topic, timeout=2 * _WAIT_SECONDS, is_optional=True)
            own = json.loads(json.dumps(settings))  # As the other has travelled.
            # Rank 0 may have compared what it knew before this one came.
            text = said["text"] or _compare(name, {0: said["made"], job.rank: own})
    except (TimeoutError, ConnectionError):
        # Rank 0 does not come to this loop, or will compare this one's then; or it is
        # gone, which the next boundary says.
        return
    if text:
        raise ValueError(text)


def _compare(name: str, told: Mapping[int, Any]) -> str:
    """Return what is wrong with what the replicas have published, if anything."""
    expected = told[0]
    for rank, made in told.items():
        if made != expected:
            differences = "; ".join(
                f"{setting} is {value!r} on rank 0, but {made.get(setting)!r} on rank "
                f"{rank}"
                for setting, value in expected.items()
                if made.get(setting) != value
            )
            return (
                f"the replicas have made `{name}` differently: {differences}. Each "
                "replica takes its share of one common order, so samples would be lost "
                "or seen twice. Make the same loaders on every replica, in the same "
                "order, with the same seed and all of the data."
            )
    return ""
