"""Trainings of sharded modules in one process, whose shard is the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticrun import (
    register,
    save_all_states,
)
from tests.support.sharding import whole

FILES = ["model", "model.rank-0", "optimizer", "optimizer.rank-0"]


def build(*, is_sharded: bool = True, width: int = 3, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, width, bias=bias), nn.BatchNorm1d(width), nn.Linear(width, 2)
    )
    if is_sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net


def make_adam(net: nn.Module) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    groups = [{"params": others}, {"params": [first], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def script(num_steps: int, *, is_sharded: bool = True) -> tuple[Any, Any]:
    """Register, train, save; return both states."""
    net = build(is_sharded=is_sharded)
    optimizer = make_adam(net)
    register(model=net, optimizer=optimizer)
    train(net, optimizer, num_steps)
    save_all_states()
    return whole(dict(net.state_dict())), whole(optimizer.state_dict())
