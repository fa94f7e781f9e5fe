"""A training that draws wherever one can, and what it comes to."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import Dataset

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    remaining_epochs_until,
)

NUM_SAMPLES = 45
BATCH = 13  # The last batch has six samples: of four shares, 2, 2, 1 and 1.
NUM_EPOCHS = 3
LAST = -1  # The number of the last batch of an epoch, in its second loop.


class Noisy(Dataset[Any]):
    """Draws on each generator for a sample."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(num_samples, 8, generator=generator)
        self._y = torch.randint(0, 3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.rand()
        return self._x[index] + noise.float(), self._y[index]


class Noise(torch.optim.SGD):
    """Draws at a step, for all shares alike."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3 * torch.randn_like(parameter))
        return super().step(closure)


def mixed(samples: list[Any]) -> list[Tensor]:
    """Mix the samples with each other, by what the collate function draws."""
    x, y = torch.utils.data.default_collate(samples)
    return [torch.lerp(x, x[torch.randperm(len(x))], torch.rand(())), y]


class Drift(nn.Module):
    """Subtracts a running mean, which a forward pass reads and then changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class Branch(nn.Module):
    """Has one of two layers take part, by the samples of the share."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one if x[0, 0] > 0 else self.two)(x)


def network(*, width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(width, 3),
    )


def digest(*modules: nn.Module) -> str:
    found = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def classify(
    num_workers: int, at_batch: Callable[[int, int], None]
) -> tuple[str, list[Any]]:
    """Train with augmentation, dropout, BatchNorm, a scheduler and clipping."""
    net = nn.Sequential(Drift(), nn.BatchNorm1d(8), Branch(), network())
    optimizer = Noise(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    # In buckets so small that some go out before the backward pass has ended.
    model = AdaptiveDataParallel(net, optimizer, scheduler, bucket_cap_mb=2e-4)
    train = AdaptiveDataLoader(
        Noisy(),
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=mixed,
        drop_last=False,
        name="train",
    )
    valid = AdaptiveDataLoader(Noisy(9), 5, even_batches=False, name="valid")
    kept = Variables(said=[])
    losses = Accumulator(name="losses")
    for epoch in remaining_epochs_until(NUM_EPOCHS):
        model.train()
        scale = float(torch.rand(())) + random.random()
        for x, y in train:
            if len(x) == 1:  # Too few for BatchNorm.
                x, y = x.repeat(2, 1), y.repeat(2)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            (scale * loss).backward()
            if elasticrun.rank() == 0:
                with torch.no_grad():  # One process looks at something.
                    model(x)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses["train"] += loss.item() * train.num_valid
            if train.is_step:
                at_batch(epoch, train.batch_index)
        model.eval()
        for x, y in valid:
            with torch.no_grad():
                losses["valid"] += cross_entropy(model(x), y).item() * len(x)
            if valid.is_step and valid.batch_index == len(valid) - 1:
                at_batch(epoch, LAST)
        with losses.synchronized():
            kept.said.append((losses["train"], losses["valid"], float(torch.rand(()))))
            losses.clear()
    return digest(net), kept.said


def contend() -> str:
    """Train two models against each other, in several backward passes a batch."""
    maker, judge = network(), nn.Sequential(network(), nn.Linear(3, 1))
    of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
    made = AdaptiveDataParallel(
        nn.Sequential(maker, nn.Linear(3, 8)), of_maker, name="a"
    )
    judged = AdaptiveDataParallel(judge, of_judge, name="b")
    train = AdaptiveDataLoader(Noisy(), BATCH, max_local_batch_size=2, name="contend")
    for x, _ in train.batches(5):
        of_judge.zero_grad()
        of_maker.zero_grad()
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        binary_cross_entropy_with_logits(judged(x), ones).backward()
        fake = made(torch.randn(len(x), 8))
        binary_cross_entropy_with_logits(judged(fake.detach()), zeros).backward()
        judge.requires_grad_(False)
        binary_cross_entropy_with_logits(judged(fake), ones).backward()
        judge.requires_grad_(True)
        of_judge.step()
        of_maker.step()
    return digest(maker, judge)


def accumulate() -> str:
    """Step after each second global batch; one layer is used in every other share.

    One is used in the first global batch of each two only.
    """
    net = nn.ModuleDict({"one": nn.Linear(8, 3), "two": nn.Linear(8, 3)})
    other = nn.Linear(8, 3)  # Which no share uses.
    net["other"], net["first"] = other, nn.Linear(8, 3)

    def forward(x: Tensor, is_first: bool) -> Tensor:
        y = net["two" if int(x[0, 0] * 100) % 2 else "one"](x)
        return y + net["first"](x) if is_first else y

    net.forward = forward  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    model = AdaptiveDataParallel(net, optimizer, name="accumulate")
    sizes = AdaptiveDataLoader(
        Noisy(), batch_sampler=[[*range(9)], [3], [], [5, 6, 40]], name="lists"
    )
    for x, y in sizes:
        cross_entropy(model(x, sizes.batch_index % 2 == 0), y).backward()
        if sizes.batch_index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert other.weight.grad is None
    return digest(net)


def step_with_closures() -> str:
    """Train with an optimizer that draws in its step, and calls a closure there."""
    net = network()
    optimizer = Noise(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer, name="closures")
    for x, y in AdaptiveDataLoader(Noisy(), BATCH, name="closed"):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return digest(net)


def train_all(
    directory: str | None = None,
    num_workers: int = 0,
    *,
    stop_at: tuple[int, int] | None = None,
    kill_at: tuple[int, int] | None = None,
) -> Any:
    """Train all; return what came of it, and what was drawn last."""

    def at_batch(epoch: int, batch: int) -> None:
        if (
            epoch,
            batch,
        ) == kill_at and elasticrun.rank() == elasticrun.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if (epoch, batch) == stop_at:
            elasticrun.request_stop()

    torch.set_num_threads(1)
    elasticrun.init(directory, save_interval="off", virtual_replicas=4)
    torch.manual_seed(5)
    random.seed(5)
    found = [classify(num_workers, at_batch), contend(), accumulate()]
    found.append(step_with_closures())
    return [*found, float(torch.rand(())), random.random()]


def path_of(directory: Path) -> str:
    return str(directory / "checkpoints")
