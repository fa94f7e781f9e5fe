"""Trainings of modules whose parameters real replicas share out."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import elasticrun
from elasticrun import AdaptiveDataLoader, State, register, remaining_epochs_until
from tests.support.programs import request_stop_and_wait

Body = Callable[[nn.Module, AdaptiveDataLoader], None]


def make_net() -> nn.Sequential:
    """Return a net whose parameters no number of replicas from 2 on divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def shard(net: nn.Sequential) -> None:
    """Shard it layer by layer over all replicas."""
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(net)


def whole(values: Any) -> Any:
    """Return nested values with DTensors put together. Collective."""
    if isinstance(values, DTensor):
        return values.full_tensor().detach().clone()
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, dict):
        return {key: whole(value) for key, value in values.items()}
    return [whole(each) for each in values] if isinstance(values, list) else values


class Sharded:
    """Trains with `fully_shard`, Adam and a scheduler for two epochs of six batches.

    Args:
        on_batch: Called in each batch, after its step.
        is_sharded: Without, it trains the bare module, which is right on one replica.
    """

    num_samples, batch_size = 56, 10

    def __init__(
        self,
        on_batch: Body = lambda net, loader: None,
        *,
        is_sharded: bool = True,
        max_local_batch_size: int | None = None,
    ) -> None:
        self.on_batch = on_batch
        self.is_sharded = is_sharded
        self.max_local_batch_size = max_local_batch_size

    def __call__(self) -> Any:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        warnings.simplefilter("always", elasticrun.CheckpointWarning)
        net = make_net()
        if self.is_sharded:
            shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        register(model=net, optimizer=optimizer, scheduler=scheduler)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(self.num_samples, 6, generator=generator).double()
        train = AdaptiveDataLoader(
            torch.utils.data.TensorDataset(data[:, :5], data[:, 5:]),
            self.batch_size,
            shuffle=True,
            max_local_batch_size=self.max_local_batch_size,
        )
        for _ in remaining_epochs_until(2):
            for x, y in train:
                if isinstance(net, FSDPModule):
                    net.set_requires_gradient_sync(train.is_step)
                loss = nn.functional.mse_loss(net(x), y) * train.loss_weight
                loss.backward()
                if train.is_step:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    self.on_batch(net, train)
        return whole(dict(net.state_dict())), whole(optimizer.state_dict())


def stopping_at(epoch: int, batch: int) -> Body:
    """Ask for a stop in one batch."""

    def body(net: nn.Module, loader: AdaptiveDataLoader) -> None:
        if (elasticrun.current_epoch(), loader.batch_index) == (epoch, batch):
            request_stop_and_wait()

    return body


class FailingState(State):
    """Lets one rank fail while it saves, once: after `number` checkpoints."""

    is_per_replica = True

    def __init__(self, rank: int, fail: Callable[[], Any], number: int) -> None:
        super().__init__("failing")
        self._rank, self._fail, self._number = rank, fail, number

    def save(self, fileobj: BinaryIO) -> None:
        self._number -= 1
        if elasticrun.rank() == self._rank and self._number == -1:
            self._fail()
        fileobj.write(b"saved")

    def load(self, fileobj: BinaryIO) -> None:
        assert fileobj.read() == b"saved"


class DyingState(State):
    """Kills rank 1 before the replicas agree on what to save."""

    def __init__(self) -> None:
        super().__init__("dying")

    def sync(self) -> None:
        if elasticrun.rank() == 1:
            die()

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"saved")

    def load(self, fileobj: BinaryIO) -> None:
        assert fileobj.read() == b"saved"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_on_a_mesh(kind: str, num_steps: int) -> Any:
    """Train on the same data everywhere, saved at the end; return all of the state.

    Args:
        kind: "tensor" (parallel), "sharded" (data parallel), "both" with two by two
            replicas, "replicated" with shards that two by two replicas have twice, or
            "bare".
    """
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    size = elasticrun.world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "tensor":
        parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    elif kind == "sharded":
        fully_shard(net)
    elif kind in ("both", "replicated"):
        names = ("data", "tensor")
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        if kind == "both":
            parallelize_module(net, mesh["tensor"], plan)
            mesh = mesh["data"]
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    register(model=net, optimizer=optimizer)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator).double()
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    elasticrun.save_all_states()
    return whole(dict(net.state_dict())), whole(optimizer.state_dict())
