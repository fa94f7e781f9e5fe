"""The process group for the replicas' collectives, over a store of their own."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from elasticrun.control.store import JobStore
from elasticrun.env import Environment, keep_gloo_on_loopback


def start_process_group(
    environment: Environment, store: JobStore, device: torch.device
) -> None:
    """Start the default process group over this generation's own store. Collective."""
    if environment.local_world_size == environment.world_size:
        keep_gloo_on_loopback(_loopback_interface())
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("process-group", store.client),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if device.type == "cuda" else None,
    )


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"
