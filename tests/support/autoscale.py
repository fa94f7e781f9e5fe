"""A job whose batch sizes are decided by force, wherever one could be."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    AgreementError,
    init,
    rank,
    remaining_epochs_until,
)
from elasticrun.saving import saver
from tests.support.stage import wait_until
from tests.support.steps import network, samples

NUM_SAMPLES, FIRST, MOST = 41, 3, 12
NUM_EPOCHS = 2
NUM_STEPS = 20  # Of the loop by steps.

Sizes = Mapping[int, int]


@dataclass(frozen=True)
class Program:
    """Trains; saves and decides at each second boundary.

    Attributes:
        by_epochs: Whether it loops over epochs, not over steps.
        sizes: A plan, with which nothing is decided.
        scaling: Of learning rates.
        kill_in: The number of the iteration of this generation, in which all die.
        kill_at: The number of the file operation, before which rank 0 dies.
        is_missed: Whether the other ranks give up waiting for the first save, which
            rank 0 commits all the same.
    """

    directory: str
    by_epochs: bool = True
    sizes: Sizes | None = None
    num_workers: int = 0
    scaling: Any = "auto"
    kill_in: int = -1
    kill_at: int = -1
    is_missed: bool = False

    def __call__(self) -> list[Any]:
        torch.set_num_threads(1)
        init(self.directory, save_interval="off", save_every="2,epoch")
        torch.manual_seed(0)
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
        model = AdaptiveDataParallel(
            net, optimizer, measure_noise=True, scaling=self.scaling
        )
        loader = AdaptiveDataLoader(
            TensorDataset(torch.arange(NUM_SAMPLES), *samples(NUM_SAMPLES)),
            self.sizes or FIRST,
            shuffle=True,
            num_workers=self.num_workers,
            name="train",
        )
        if self.sizes is None:
            decide_by_force(loader)
        if self.kill_at >= 0 and rank() == 0:
            die_before_operation(self.kill_at)
        mark = Path(f"{self.directory}-missed")
        with missing_the_first_save(mark) if self.is_missed else nullcontext():
            self._train(loader, model, optimizer)
        return [parameter.detach() for parameter in net.parameters()]

    def _train(self, loader: AdaptiveDataLoader, model: Any, optimizer: Any) -> None:
        num_iterations = 0
        for _ in remaining_epochs_until(NUM_EPOCHS if self.by_epochs else 1):
            for _, x, y in loader if self.by_epochs else loader.batches(NUM_STEPS):
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                if num_iterations == self.kill_in:
                    os.kill(os.getpid(), signal.SIGKILL)
                num_iterations += 1


def decide_by_force(loader: AdaptiveDataLoader) -> None:
    """Let rank 0 decide what nobody can foresee."""
    loader.autoscale(MOST, min_efficiency=0)
    autoscaler = loader._autoscaler
    assert autoscaler is not None
    draw = random.Random(os.urandom(8))
    autoscaler.choose = lambda: draw.randint(FIRST, MOST)  # type: ignore[method-assign]


@contextmanager
def missing_the_first_save(mark: Path) -> Iterator[None]:
    """Let rank 0 commit only when the others have run out of patience."""
    replace = os.replace

    def commit(*arguments: Any, **keywords: Any) -> None:
        wait_until(mark.exists, "the others to give up")
        replace(*arguments, **keywords)

    if rank() == 0:
        os.replace = commit
    else:
        saver._PATIENCE = 2.0
    try:
        yield
    except AgreementError:
        mark.touch()
        raise


def die_before_operation(number: int) -> None:
    """Kill this process before its `number`-th operation that makes a file durable."""
    count = 0

    def noticed(operation: Any) -> Any:
        def act(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **keywords)

        return act

    for name in ("fsync", "replace", "mkdir"):
        setattr(os, name, noticed(getattr(os, name)))
