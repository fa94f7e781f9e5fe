"""Gathers small values of every replica on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def num_replicas() -> int:
    """Return how many share the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """Return which of them this one is; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(
    value: Any, *, before_reading: Callable[[], None] = lambda: None
) -> list[Any]:
    """Return the value of every rank, by rank. Collective.

    Values travel as JSON through the default process group, on the device that its
    backend needs; nothing is unpickled. Without a process group there is one value.

    Args:
        before_reading: Called before a value is read that may be on its way to the
            program, as on GPUs.
    """
    if num_replicas() == 1:
        return [value]
    device = _collective_device()
    data = json.dumps(value).encode()
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    before_reading()
    longest = int(sizes.max())
    sent = torch.zeros(longest, dtype=torch.uint8, device=device)
    sent[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent)
    before_reading()
    return [
        json.loads(bytes(each[:size].cpu().tolist()))
        for each, size in zip(received, sizes.tolist(), strict=True)
    ]


def start_sums(values: list[int]) -> Callable[[], list[int]]:
    """Start to sum numbers over all replicas; return what waits for that. Collective.

    Without a process group the sums are the numbers.
    """
    if num_replicas() == 1:
        return lambda: values
    total = torch.tensor(values, dtype=torch.int64, device=_collective_device())
    work = dist.all_reduce(total, async_op=True)

    def wait() -> list[int]:
        work.wait()
        return [int(each) for each in total]

    return wait


def _collective_device() -> torch.device:
    """Return where tensors have to be for collectives of the default process group.

    On the CPU wherever its backends, of which there may be one for each kind of device,
    know of that; else on this process's current GPU.
    """
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
