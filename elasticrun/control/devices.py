"""Which device each replica has: a GPU of its own, if that is true of all."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elasticrun.control.store import JobStore
from elasticrun.env import Environment

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gloo", "nccl")


class Sight(NamedTuple):
    """What one replica sees.

    Attributes:
        host: Its machine.
        num_gpus: How many GPUs are visible to it.
        number: Which of them would be its own; -1 if none.
        gpu: What that one is known by on its machine.
    """

    host: str
    num_gpus: int
    number: int
    gpu: str


def choose_device(
    environment: Environment, backend: str, store: JobStore | None
) -> torch.device:
    """Return this replica's device; a GPU either for all replicas or for none.

    Collective, since the backend of the process group depends on it. A replica to which
    a single GPU is visible takes that, whatever its local rank: schedulers often show
    each process its own GPU alone.

    Raises:
        ValueError: `backend` is unknown, or is "nccl" without a GPU for each replica.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}.")
    if backend == "gloo":
        return torch.device("cpu")
    own = _look(environment.local_rank)
    sights = [own] if store is None else _exchange(own, environment, store)
    problem = why_not_a_gpu_each(sights)
    if problem and backend == "nccl":
        raise ValueError(
            f"backend='nccl' needs a GPU of its own for each replica, but {problem}. "
            "Start fewer replicas, show each of them another GPU, or use "
            "backend='gloo'."
        )
    if problem:
        if any(sight.num_gpus for sight in sights) and environment.rank == 0:
            logger.warning("all replicas train on the CPU, since %s", problem)
        return torch.device("cpu")
    device = torch.device("cuda", own.number)
    torch.cuda.set_device(device)
    return device


def why_not_a_gpu_each(sights: Sequence[Sight]) -> str:
    """Return why not every replica can have a GPU of its own; empty if they can.

    Args:
        sights: By rank.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, sight in enumerate(sights):
        if sight.number < 0:
            return f"rank {rank} on {sight.host} sees {_gpus(sight.num_gpus)} for it"
        owner = owners.setdefault((sight.host, sight.gpu), rank)
        if owner != rank:
            return (
                f"rank {owner} and rank {rank} on {sight.host} see the same GPU, and "
                "no other that each could have"
            )
    return ""


def choose_number(local_rank: int, num_gpus: int) -> int:
    """Return which of the visible GPUs a replica would have; -1 for none."""
    if num_gpus == 1:
        return 0
    return local_rank if local_rank < num_gpus else -1


def _gpus(number: int) -> str:
    return {0: "no GPU"}.get(number, f"{number} GPUs, but none")


def _look(local_rank: int) -> Sight:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = choose_number(local_rank, num_gpus)
    gpu = "" if number < 0 else str(torch.cuda.get_device_properties(number).uuid)
    return Sight(socket.gethostname(), num_gpus, number, gpu)


def _exchange(own: Sight, environment: Environment, store: JobStore) -> list[Sight]:
    if environment.rank == 0:
        others = range(1, environment.world_size)
        sights = [own, *(store.take(f"device/{rank}") for rank in others)]
        store.put("devices", sights)
    else:
        store.put(f"device/{environment.rank}", own)
        sights = store.take("devices")
    return [Sight(*sight) for sight in sights]
