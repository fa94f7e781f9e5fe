"""The process group: one of the program's own, and what is asked of elasticrun's."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elasticrun.testing import run_generation

HOSTS = ["localhost", "localhost", "127.0.0.1"]


def place_in_own_group(path: str, backend: str) -> tuple[int, int, int, int]:
    """Start a group on machines that are made up, as a program without a launcher."""
    import elasticrun as er

    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=len(HOSTS)
    )
    socket.gethostname = lambda: HOSTS[rank]
    environment = er.current_job().environment
    dist.barrier()
    return er.rank(), er.local_rank(), er.world_size(), environment.local_world_size


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_local_ranks_count_on_each_machine(tmp_path: Path, backend: str) -> None:
    places = run_generation(place_in_own_group, 3, str(tmp_path / "store"), backend)
    assert places == [(0, 0, 3, 2), (1, 1, 3, 2), (2, 0, 3, 1)]


def seconds_of_collectives() -> float:
    """Return how long the group that elasticrun has started waits for a collective."""
    from datetime import timedelta

    import elasticrun as er

    er.init(timeout=timedelta(minutes=2))
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_collective_may_take_as_long_as_the_program_says() -> None:
    assert run_generation(seconds_of_collectives, 2) == [120.0, 120.0]


def device_of_program(path: str) -> str:
    """Choose a GPU as a program does; the three that there are, are made up."""
    import elasticrun as er

    rank = int(os.environ["RANK"])
    chosen: list[int] = []
    for name, stand_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 3,
        "current_device": lambda: (rank + 1) % 2,
        "get_device_properties": lambda n: type("", (), {"uuid": f"gpu-{n}"}),
        "set_device": lambda device: chosen.append(device.index),
        "get_rng_state_all": list,
        "mem_get_info": lambda device: (1, 1),
    }.items():
        setattr(torch.cuda, name, stand_in)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    device = er.device()
    assert chosen == [device.index]
    return str(device)


def test_the_gpu_that_the_program_has_chosen_stays(tmp_path: Path) -> None:
    devices = run_generation(device_of_program, 2, str(tmp_path / "store"))
    assert devices == ["cuda:1", "cuda:0"]
