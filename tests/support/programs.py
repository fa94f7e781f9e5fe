"""Programs for real replicas: what runs in every process of a generation."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    current_epoch,
    current_job,
    init,
    rank,
    register,
    remaining_epochs_until,
    request_stop,
    save_all_states,
    world_size,
)
from elasticrun.checkpoint.states.generators import seed_all
from tests.support.data import Draws, Numbers
from tests.support.generations import draw_from_each

Place = tuple[int | None, str, int]  # Epoch, loader, number of the batch.

LEAVE = 75  # The exit code of a stop.


@dataclass(frozen=True)
class Program:
    """Loops over loaders before, in and after epochs; leaves in one of the batches.

    Attributes:
        loaders: The length of each loader's data set, and its batch size.
        in_epoch: The loaders to loop over in each epoch.
        leave_in: Where all replicas save and leave; that batch is delivered again.
        stop_in: Where the last rank asks for a stop, and all leave at one boundary.
        fail_in: Where an exception leaves a loop, to be caught around it.
    """

    directory: str
    loaders: dict[str, tuple[int, int]]
    in_epoch: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    num_epochs: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    leave_in: Place | None = None
    stop_in: Place | None = None
    fail_in: Place | None = None

    def __call__(self) -> str:
        init(self.directory, save_interval="off")
        loaders = {
            name: AdaptiveDataLoader(
                Numbers(length), batch_size, shuffle=True, name=name, **self.options
            )
            for name, (length, batch_size) in self.loaders.items()
        }
        for name in self.before:
            self._loop(loaders[name])
        for _ in remaining_epochs_until(self.num_epochs):
            for name in self.in_epoch:
                with suppress(LookupError):
                    self._loop(loaders[name])
        for name in self.after:
            self._loop(loaders[name])
        return "finished"

    def _loop(self, loader: AdaptiveDataLoader) -> None:
        is_even = self.options.get("even_batches", True)
        for _ in loader:
            here = (current_epoch(), loader.name, loader.batch_index)
            if here == self.leave_in:
                save_all_states()
                raise SystemExit(LEAVE)
            if here == self.stop_in and rank() == world_size() - 1:
                request_stop_and_wait()
            if here == self.fail_in:
                raise LookupError
            if is_even and world_size() > 1:
                dist.barrier()  # As the gradients of a step do.


def request_stop_and_wait() -> None:
    """Ask for a stop, and go on once that has come to this replica's watcher.

    From then on it does not let the replica pass more than one boundary before all have
    agreed, so that the stop comes in this loop however slow the watchers are.
    """
    request_stop()
    gate = current_job()._gate
    while not gate._is_attentive:
        threading.Event().wait(0.001)


class StopOnce:
    """Lets the last rank ask for a stop when a body runs first, and never again.

    Who asks again after all have agreed would wait for ever.
    """

    def __init__(self) -> None:
        self._has_asked = False

    def __call__(self, *_: Any) -> None:
        if not self._has_asked and rank() == world_size() - 1:
            self._has_asked = True
            request_stop_and_wait()


@dataclass
class Leave:
    """Lets the last rank leave in one of the next bodies, by "stop" or "kill"."""

    how: str
    num_bodies: int

    def __call__(self, *_: Any) -> None:
        self.num_bodies -= 1
        if self.num_bodies == 0 and rank() == world_size() - 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            request_stop_and_wait()


def draw_in_first_batches(directory: str, *, is_first: bool) -> list[Any]:
    """Return what this rank draws in a loop that was left, from its batch 1 on."""
    init(directory, save_interval="off")
    seed_all(rank())
    loader = AdaptiveDataLoader(Numbers(24), 6, name="train")
    drawn: list[Any] = []
    for _ in loader:
        if is_first and loader.batch_index == 1:
            save_all_states()
            drawn.append(draw_from_each())
            break
        drawn.append(draw_from_each())
    return drawn


def claim(directory: str, *, values: dict[str, int], num_saves: int, keep: int) -> Any:
    """Make variables by name, save some times; return what they were after loading."""
    init(directory, save_interval="off", keep=keep)
    made = {name: Variables(value=0, name=name) for name in values}
    loaded = {name: variables.value for name, variables in made.items()}
    for name, variables in made.items():
        variables.value = values[name]
    for _ in range(num_saves):
        save_all_states()
    return loaded


class Net(nn.Module):
    """Small, with dropout: a step depends on every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Training:
    """Trains the net for three epochs; asks for a stop in one step."""

    def __init__(self, *, num_workers: int, stop_in: int = -1) -> None:
        self._num_workers = num_workers
        self._stop_in = stop_in

    def __call__(self, directory: str | None = None) -> list[Tensor]:
        """Return the parameters at the end."""
        if directory is not None:
            init(directory, save_interval="off")
        torch.set_num_threads(
            1
        )  # Threads that wait for work would take the others' cores.
        seed_all(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        register(model=net, optimizer=optimizer, scheduler=scheduler)
        best = Variables(loss=float("inf"), num_steps=0)
        train = AdaptiveDataLoader(
            Draws(22), 6, shuffle=True, num_workers=self._num_workers, name="train"
        )
        valid = AdaptiveDataLoader(Draws(6), 3, seed_each="sample", name="valid")
        seed_all(100 + rank())
        for _ in remaining_epochs_until(3):
            net.train()
            for batch in train:
                self._step(net, optimizer, batch.float(), train.loss_weight)
                best.num_steps += 1
                if best.num_steps == self._stop_in and rank() == 0:
                    request_stop_and_wait()
            net.eval()
            with torch.no_grad():
                losses = [net(batch.float()).square().mean().item() for batch in valid]
            best.loss = min([best.loss, *losses])
            scheduler.step()
        if world_size() == 1:
            assert best.num_steps == 12
        return [parameter.detach().clone() for parameter in net.parameters()]

    def _step(
        self, net: Net, optimizer: torch.optim.Optimizer, x: Tensor, weight: float
    ) -> None:
        x = x / 22 + 0.01 * torch.randn_like(x) * random.random() * np.random.rand()
        optimizer.zero_grad()
        (net(x).square().mean() * weight).backward()
        if world_size() > 1:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()


def train_with(directory: str, training: Training) -> list[list[float]]:
    """Return the parameters that a training ends with, as numbers."""
    return [p.flatten().tolist() for p in training(directory)]
