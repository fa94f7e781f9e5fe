"""Chooses the device of each replica: a GPU for every one, or for none."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elasticrun.logger import Logger
from elasticrun.replicas.environment import Environment, variables
from elasticrun.replicas.exchange import DEVICE, Exchange
from elasticrun.replicas.gpus import count_gpus

logger = Logger(__name__)

_MEMORY_SECONDS, _LOOK_SECONDS = 5.0, 0.05
_MOSTLY_FREE = 0.9

BACKENDS = ("auto", "gloo", "nccl")


class VisibleGpus(NamedTuple):
    """The GPUs that are visible to one replica.

    Attributes:
        num_gpus: How many GPUs are visible to it.
        number: Which of them would be its own; -1 if none.
        gpu: What that one is known by on its machine.
        problem: Why torch cannot use the GPUs that there are; else empty.
    """

    host: str
    num_gpus: int
    number: int
    gpu: str
    problem: str = ""


def choose_device(
    environment: Environment, backend: str, exchange: Exchange
) -> torch.device:
    """Return this replica's device; a GPU either for all replicas or for none.

    Collective, since the backend of the process group depends on it. A replica to which
    a single GPU is visible takes that, whatever its local rank: schedulers often show
    each process its own GPU alone. A program that has started a process group and CUDA
    itself has chosen its GPU, which stays the current one.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}.")
    if backend == "gloo":
        return torch.device("cpu")
    own = _visible_gpus(environment.local_rank)
    problem, has_gpus = exchange.agree(
        DEVICE,
        own,
        _choose_for_all,
        is_end=lambda verdict: verdict[0] and backend == "nccl",
    )
    if problem and backend == "nccl":
        raise ValueError(
            f"backend='nccl' needs a GPU of its own for each replica, but {problem}. "
            "Start fewer replicas, show each of them another GPU, or use "
            "backend='gloo'."
        )
    if problem:
        if has_gpus and environment.rank == 0:
            logger.warning("all replicas train on the CPU, since %s", problem)
        return torch.device("cpu")
    device = torch.device("cuda", own.number)
    torch.cuda.set_device(device)
    _wait_for_memory(device)
    return device


def _wait_for_memory(device: torch.device) -> None:
    """Wait while memory of the GPU becomes free, as of a replica that was killed.

    The driver may take a while to take back what a process held that has ended. Others
    may use the GPU, too: what they hold is not waited for.
    """
    deadline = time.monotonic() + _MEMORY_SECONDS
    free, total = torch.cuda.mem_get_info(device)
    while free < _MOSTLY_FREE * total and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, (free, _) = free, torch.cuda.mem_get_info(device)
        if free <= before:
            return


def _choose_for_all(told: list[Any]) -> tuple[str, bool]:
    """Return why not every replica can have a GPU, and whether there are any at all."""
    seen_by_rank = [VisibleGpus(*each) for each in told]
    has_gpus = any(seen.num_gpus or seen.problem for seen in seen_by_rank)
    return why_not_a_gpu_each(seen_by_rank), has_gpus


def why_not_a_gpu_each(seen_by_rank: Sequence[VisibleGpus]) -> str:
    """Return why not every replica can have a GPU of its own; empty if they can."""
    owners: dict[tuple[str, str], int] = {}
    for rank, seen in enumerate(seen_by_rank):
        if seen.number < 0:
            if seen.problem:
                return f"rank {rank} on {seen.host} cannot use its GPUs: {seen.problem}"
            gpus = f"{seen.num_gpus} GPUs, but none" if seen.num_gpus else "no GPU"
            return f"rank {rank} on {seen.host} sees {gpus} for it"
        owner = owners.setdefault((seen.host, seen.gpu), rank)
        if owner != rank:
            return (
                f"rank {owner} and rank {rank} on {seen.host} see the same GPU, and "
                "no other that each could have"
            )
    return ""


def choose_number(local_rank: int, num_gpus: int) -> int:
    """Return which of the visible GPUs a replica would have; -1 for none."""
    if num_gpus == 1:
        return 0
    return local_rank if local_rank < num_gpus else -1


def _visible_gpus(local_rank: int) -> VisibleGpus:
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return VisibleGpus(host, 0, -1, "", _why_no_cuda())
    num_gpus = torch.cuda.device_count()
    if dist.is_initialized() and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
    else:
        number = choose_number(local_rank, num_gpus)
    gpu = "" if number < 0 else str(torch.cuda.get_device_properties(number).uuid)
    return VisibleGpus(host, num_gpus, number, gpu)


def _why_no_cuda() -> str:
    """Return why torch cannot use GPUs that it was built for and that are here."""
    if not (torch.version.cuda or torch.version.hip) or not count_gpus(variables()):
        return ""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "torch.cuda.is_available() is False"
