"""Trains without moving, and compares what was measured with exact gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, register
from elasticrun.adaptive import noise
from elasticrun.adaptive.noise import MeasuredStep
from tests.support.steps import network, samples

NUM_SAMPLES = 60
NUM_BATCHES = 200
KINDS = ["plain", "clipped", "scaled", "two losses", "counted"]


def exact() -> MeasuredStep:
    """Return what steps tell in the mean, where no sample comes twice in a pass."""
    x, y = samples(NUM_SAMPLES)
    net = network()
    parameters = dict(net.named_parameters())

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(torch.func.functional_call(net, parameters, (x,)), y)

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    gradients = each(parameters, x, y).values()
    rows = torch.cat([each.reshape(NUM_SAMPLES, -1) for each in gradients], dim=1)
    covariance = rows.var(dim=0).sum().item()
    squared_norm = rows.mean(dim=0).square().sum().item()
    return MeasuredStep(covariance, squared_norm - covariance / NUM_SAMPLES)


def measured(
    kind: str = "plain",
    batch_size: int = 12,
    size: int | None = None,
    num_batches: int = NUM_BATCHES,
    mesh: tuple[int, ...] | None = None,
) -> list[MeasuredStep]:
    """Return what each step tells of a network whose learning rate is 0.

    Args:
        mesh: Of the replicas over which its parameters are sharded; all but the last
            dimension have copies of them.
    """
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    noise.MEASURED_EACH = 1
    net = network()
    if mesh is not None:
        shard(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    name = f"{kind}-{size}".replace(" ", "-")
    model = AdaptiveDataParallel(net, optimizer, name=name, measure_noise=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=kind == "scaled")
    if kind == "scaled":
        register(**{f"{name}.scaler": scaler})
    data = TensorDataset(*samples(NUM_SAMPLES))
    loader = AdaptiveDataLoader(
        data, batch_size, shuffle=True, max_local_batch_size=size
    )
    for x, y in loader.batches(num_batches):
        optimizer.zero_grad()
        if kind == "two losses":
            for _ in range(2):
                (mse_loss(model(x), y) / 2).backward()
        elif kind == "counted":
            total = mse_loss(model(x), y, reduction="sum") / y.numel()
            model.weigh(total, count=y.numel()).backward()
        else:
            scaler.scale(mse_loss(model(x), y)).backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        if kind == "adversaries":  # Another loss comes after the step, and is dropped.
            mse_loss(model(x), -y).backward()
    assert model._noise is not None
    model._noise.sum_parts()
    steps = list(model._noise._steps)
    # In the first step nobody knows yet that two passes make one gradient.
    assert len(steps) == num_batches - (kind == "two losses")
    return steps


def shard(net: nn.Sequential, mesh: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes seconds

    assert math.prod(mesh) == elasticrun.world_size()  # Makes the process group.
    over = init_device_mesh(
        "cpu", mesh, mesh_dim_names=("copies", "shards")[-len(mesh) :]
    )
    for module in (net[0], net):
        fully_shard(module, mesh=over)


def assert_unbiased(steps: list[MeasuredStep]) -> None:
    """Compare the means of what steps tell with what is exact."""
    values = np.array(steps)
    errors = values.std(axis=0, ddof=1) / math.sqrt(len(steps))
    z = (values.mean(axis=0) - np.array(exact())) / errors
    assert (abs(z) < 4).all(), z
