"""This replica's device, and the process group for its collectives."""

from __future__ import annotations

import logging
import socket

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from elasticrun.control.store import JobStore
from elasticrun.env import Environment, keep_gloo_on_loopback

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gloo", "nccl")


def choose_device(environment: Environment, backend: str) -> torch.device:
    """Return this replica's device: a GPU of its own if each replica can have one.

    Raises:
        ValueError: `backend` is unknown, or is "nccl" without a GPU for each replica.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}.")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_own_gpu = environment.local_rank < num_gpus
    fits = environment.local_world_size <= num_gpus and has_own_gpu
    if backend == "nccl" and not fits:
        raise ValueError(
            f"backend='nccl' needs one GPU for each replica, but this machine has "
            f"{num_gpus} GPUs for {environment.local_world_size} replicas. Start fewer "
            "replicas here, or use backend='gloo'."
        )
    if backend == "auto" and num_gpus and not fits:
        logger.warning(
            "this replica trains on the CPU: %d GPUs are visible to it, but %d "
            "replicas are on this machine, and this one has local rank %d",
            num_gpus,
            environment.local_world_size,
            environment.local_rank,
        )
    if backend == "gloo" or not fits:
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


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
