"""A training loop of which tests know every number, and can hold it at a place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    current_job,
    generation,
    rank,
    remaining_epochs_until,
    world_size,
)
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.stage import Stage, wait_until

MODULUS = 1_000_003
NUM_BATCHES = 10  # Of a small loop.


@dataclass
class Loop:
    """A job over `Numbers`, one loop an epoch.

    Attributes:
        is_lock_step: Whether every batch has a collective.
        pace: Seconds that each batch takes.
        on_batch: Called in the body, with the loader.
    """

    stage: Stage
    num_samples: int = 1200
    batch_size: int = 6
    num_epochs: int = 1
    is_lock_step: bool = True
    pace: float = 0.0
    on_batch: Callable[[AdaptiveDataLoader], object] = lambda loader: None
    dataset: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> int:
        """Train; return a number that depends on every batch and their order."""
        self.stage.keep_log(os.environ["RANK"])
        torch.set_num_threads(1)
        loader = AdaptiveDataLoader(
            self.dataset or Numbers(self.num_samples),
            self.batch_size,
            shuffle=True,
            **self.options,
        )
        model = Variables(value=0)
        for _ in remaining_epochs_until(self.num_epochs):
            for batch in loader:
                total = batch[: loader.num_valid].sum()
                if self.is_lock_step and world_size() > 1:
                    dist.all_reduce(total)
                model.value = (model.value * 31 + int(total)) % MODULUS
                self.on_batch(loader)
                if self.pace:
                    time.sleep(self.pace)
        return int(model.value)


def small(stage: Stage, **changes: Any) -> Loop:
    return Loop(stage, num_samples=6 * NUM_BATCHES, **changes)


def value_after(batches: dict[int, list[int]]) -> int:
    """Return what one epoch of these global batches trains the model to."""
    value = 0
    for batch in sorted(batches):
        value = (value * 31 + sum(batches[batch])) % MODULUS
    return value


def check_ends_right(stage: Stage, world_size: int, variables: dict[str, str]) -> None:
    """Let a small loop go on to its end; all has been trained, and in its order."""
    values = run_generation(small(stage), world_size, variables=variables)
    assert stage.delivered() == list(range(6 * NUM_BATCHES))
    assert set(values) == {value_after(stage.samples())}


def hold_at(stage: Stage, batch: int, *ranks: int) -> Callable[[Any], None]:
    """Return a body that holds these ranks at a batch until the mark `go`."""

    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index == batch and rank() in ranks:
            stage.mark(f"held-{rank()}")
            stage.wait_for("go")

    return body


def is_stop_due() -> bool:
    """Return whether replicas have agreed to stop, or save, at a boundary to come."""
    return bool(current_job()._gate._due)


def hold(stage: Stage) -> None:
    """Leave `held-GENERATION-RANK`; wait for `go-GENERATION`, or for a stop.

    That is for a test that has asked for one, and marks `stop-GENERATION`: it is agreed
    on a moment later, when a fast program would have come to its end.
    """
    here = generation()
    stage.mark(f"held-{here}-{rank()}")
    wait_until(
        lambda: (
            stage.has(f"go-{here}") or (stage.has(f"stop-{here}") and is_stop_due())
        ),
        f"mark go-{here}, or a stop",
    )


def stop_at(stage: Stage, batch: int, *ranks: int) -> Callable[[Any], None]:
    """Return a body that also holds them until a stop is agreed on.

    Without that, a slow watcher would come too late for a fast loop.
    """
    hold = hold_at(stage, batch, *ranks)

    def body(loader: AdaptiveDataLoader) -> None:
        hold(loader)
        if loader.batch_index == batch and rank() in ranks:
            wait_until(is_stop_due, "the agreement to stop")

    return body


def held(ranks: Iterable[int]) -> list[str]:
    """Return the marks of the ranks that `hold_at` holds."""
    return [f"held-{rank}" for rank in ranks]
