"""The process group for the replicas' collectives, over a store of their own."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from elasticrun.replicas.environment import Environment, keep_gloo_on_loopback
from elasticrun.replicas.store import PROCESS_GROUP, JobStore


def start_process_group(
    environment: Environment,
    store: JobStore,
    device: torch.device,
    *,
    timeout: float | None = None,
) -> None:
    """Start the default process group over this generation's own store. Collective."""
    if environment.local_world_size == environment.world_size:
        keep_gloo_on_loopback(_loopback_interface())
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(PROCESS_GROUP, store.client),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if device.type == "cuda" else None,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"
