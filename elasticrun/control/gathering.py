"""Small values of every replica, brought to all of them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return the value of every rank, by rank. Collective.

    Values travel as JSON through the default process group, on the device that its
    backend needs; nothing is unpickled. Without a process group there is one value.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    data = json.dumps(value).encode()
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    sent = torch.zeros(longest, dtype=torch.uint8, device=device)
    sent[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent)
    return [
        json.loads(bytes(each[:size].cpu().tolist()))
        for each, size in zip(received, sizes.tolist(), strict=True)
    ]
