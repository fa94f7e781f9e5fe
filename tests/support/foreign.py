"""A trainer that owns its loop, as a framework's: it reads ahead and evaluates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ForeignLoop,
    Variables,
    current_job,
    finished_epochs,
    init,
    register,
    world_size,
)
from elasticrun.testing import read_trace

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 23, 6, 2
NUM_STEPS = 4  # In an epoch: batches of 6, 6, 6 and 5 samples.
EVALUATED = 2  # Steps between two evaluations.

Place = tuple[int, int]  # Epoch, global batch.
Batches = dict[Place, list[int]]


def nothing(trainer: Trainer) -> None:
    """Let the step be."""


@dataclass
class Trainer:
    """Trains one net by `AdaptiveDataParallel`, and one by a DDP of its own.

    Attributes:
        on_step: Called when a step is trained, evaluated and counted.
        fails_at: The step in the job after which it raises, once.
        log: What every evaluation saw, by steps in the job.
    """

    directory: str
    options: dict[str, Any] = field(default_factory=dict)
    on_step: Callable[[Trainer], None] = nothing
    save_interval: float | str = "off"
    fails_at: int = -1

    def __call__(self) -> dict[str, Any]:
        init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        self._make()
        while finished_epochs() < NUM_EPOCHS:
            try:
                self._train_epoch()
            except ZeroDivisionError:
                self.loop.leave()
        self.loop.finish()
        both = nn.ModuleDict({"net": self.net, "other": self.other})
        return {
            "parameters": {
                name: each.detach().flatten().tolist()
                for name, each in both.named_parameters()
            },
            "count": self.count.steps,
            "log": self.count.log,
        }

    def _make(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1).double()
        self.other = nn.Sequential(nn.Linear(4, 1).double())
        optimizer = torch.optim.Adam(self.net.parameters(), 0.1)
        self.model = AdaptiveDataParallel(self.net, optimizer)
        self.optimizer = torch.optim.Adam(self.other.parameters(), 0.1)
        register(other=self.other, other_optimizer=self.optimizer)
        self.ddp: nn.Module = self.other
        if world_size() > 1:
            self.ddp = DistributedDataParallel(self.other)
        self.optimizers = [optimizer, self.optimizer]
        self.train = AdaptiveDataLoader(
            TensorDataset(self.x), BATCH_SIZE, shuffle=True, name="train"
        )
        self.valid = AdaptiveDataLoader(
            TensorDataset(self.x), 4, shuffle=True, name="valid"
        )
        self.count = Variables(steps=0, log=[])
        self.loop = ForeignLoop("trainer")

    def _train_epoch(self) -> None:
        loop = self.loop
        epoch, step = loop.begin(len(self.train))
        for (x,), share in one_ahead(self.train.read(epoch, step)):
            loop.take(share)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss_of(self.model, x).backward()
            (loss_of(self.ddp, x) * loop.loss_weight).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.count.steps += 1
            if self.count.steps % EVALUATED == 0:
                self.count.log.append((self.count.steps, self._evaluate()))
            self.on_step(self)
            loop.pass_boundary()
            if self.count.steps == self.fails_at:
                self.fails_at = -1
                raise ZeroDivisionError
        loop.end()

    def _evaluate(self) -> list[int]:
        """Return the first samples of the batches, in the order of their loop."""
        return [int(self._number(x)) for (x,) in self.valid if self.valid.num_valid]

    def _number(self, x: Tensor) -> Tensor:
        return (self.x == x[0]).all(1).nonzero()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return mse_loss(model(x), x.sum(1, keepdim=True))


def one_ahead(pairs: Iterator[Any]) -> Iterator[Any]:
    """Yield pairs, each when the next one has been read already."""
    ahead = list(next(pairs, ()))
    for pair in pairs:
        yield ahead
        ahead = list(pair)
    if ahead:
        yield ahead


def delivered(directory: str | Path) -> Batches:
    """Return the samples of each global batch, as it was last trained with."""
    return {place: batch for (_, place), batch in sorted(deliveries(directory).items())}


def deliveries(directory: str | Path) -> dict[tuple[int, Place], list[int]]:
    """Return the samples of each global batch by the generation that took it."""
    batches: dict[tuple[int, Place], list[tuple[int, int]]] = defaultdict(list)
    for line in sorted(read_trace(directory), key=lambda line: line["rank"]):
        if not line.get("inside"):
            key = (line["generation"], (line["epoch"], line["batch"]))
            places = line.get("places") or repeat(0)  # Of neighbours.
            batches[key] += zip(
                places, line["indices"][: line["num_valid"]], strict=False
            )
    return {
        key: [index for _, index in sorted(own, key=itemgetter(0))]
        for key, own in batches.items()
    }


class Listed:
    """The batches of each epoch in turn, and of the last one ever after."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._last, last_batch = max(batches)
        self._num_batches = last_batch + 1
        self._epoch = -1

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        self._epoch = min(self._epoch + 1, self._last)
        return (self._batches[self._epoch, number] for number in range(len(self)))


def position_of(trainer: Trainer) -> Place:
    """Return epoch and step of the body that runs."""
    position = current_job().progress.position
    return position.finished_epochs, position.index
