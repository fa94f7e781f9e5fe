"""What changes within a loop, and what is said and written about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch

from elasticrun.data.order.plan import NOTHING, MicroBatch, Part
from elasticrun.data.progress_bar import ProgressBar
from elasticrun.errors import LoopOrderError, StateNameError
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.trace import Trace

# How a loop ends: by itself, by `break`, by an exception in its body, or by one in what
# delivers it.
Ending = Literal["over", "break", "exception", "failed"]

_NO_BATCH: MicroBatch = (0, [], Part(0, 0, 0, 0, True, 0, 0))


class LoopStart(NamedTuple):
    """Where a loop begins.

    Attributes:
        epoch: The epochs that are finished.
        num_loops: The loops that are finished since the last epoch was.
        inside: What tells it from others in the same body; empty outside of loops.
        at: Its own index.
        offset: Where its index 0 is in the endless passes; None in a loop over one.
    """

    epoch: int
    num_loops: int
    inside: tuple[int, ...]
    at: int
    offset: int | None


class IndexCounter(Protocol):
    """What counts the index of a loop."""

    @property
    def index(self) -> int: ...

    def advance(self, num: int) -> None: ...


class InnerCounter:
    """Counts the index of a loop in the body of another one, for nobody else."""

    def __init__(self) -> None:
        self.index = 0

    def advance(self, num: int) -> None:
        self.index += num


class RunningLoop:
    """What changes within a loop; apart, since torch guards a loader's attributes.

    Attributes:
        current: The current micro-batch.
        where: Where the loop stands in the program.
        start: Where in the job it began; None outside of loops.
        first: The number of its first batch, had it not been interrupted.
        num_batches: How many it has; None without an end.
        bar: Shows how far it has come.
        reading: What reads its batches, perhaps in workers.
        counter: Counts its index.
        reach: Called after each global batch.
    """

    __slots__ = (
        "bar",
        "counter",
        "current",
        "first",
        "num_batches",
        "reach",
        "reading",
        "start",
        "where",
    )

    def __init__(
        self,
        where: str = "no loop",
        start: LoopStart | None = None,
        *,
        first: int = 0,
        num_batches: int | None = None,
    ) -> None:
        self.current = _NO_BATCH
        self.where = where
        self.start = start
        self.first = first
        self.num_batches = num_batches
        self.bar: ProgressBar | None = None
        self.reading: Iterator[Any] = iter(())
        self.counter: IndexCounter = InnerCounter()
        self.reach: Callable[[], None] = _reach_nothing

    @property
    def part(self) -> Part:
        return self.current[2]

    def enter(self, job: Job, bar: ProgressBar | None) -> None:
        """Be the loop that the job's position is in."""
        self.counter = job.progress
        self.reach = job.boundary.reach
        if bar is not None:
            self.bar = bar
            self.reach = self._update_and_reach

    def pass_empty(self, in_flight: deque[MicroBatch]) -> None:
        """Pass the boundaries of global batches that have nothing for this replica."""
        while in_flight and in_flight[0][1] is NOTHING:
            _, _, part = in_flight.popleft()
            self.counter.advance(part.advance)
            self.reach()

    def _update_and_reach(self) -> None:
        assert self.bar is not None
        self.bar.update()
        current_job().boundary.reach()


def _reach_nothing() -> None:
    """Be the boundary of a loop that has none: it belongs to the batch around it."""


def trace_batch(trace: Trace, loop: RunningLoop) -> None:
    """Write that a micro-batch is delivered."""
    start = loop.start
    assert start is not None
    batch, indices, part = loop.current
    trace.write(
        epoch=start.epoch,
        loop=start.num_loops,
        inside=start.inside,
        batch=batch - loop.first,
        micro=part.micro,
        indices=indices.tolist() if isinstance(indices, torch.Tensor) else indices,
        num_valid=part.num_valid,
    )


def check_place(job: Job, name: str | None) -> None:
    """Refuse a loader that a restart would not make again under the same name.

    Raises:
        StateNameError: The name is empty.
        LoopOrderError: It is made inside a loop, or unnamed inside an epoch.
    """
    if name is not None and not name:
        raise StateNameError(
            "name='' cannot name a loader. Give it a name that tells what it is for, "
            "or none at all."
        )
    if job.loader is not None:
        raise LoopOrderError(
            f"a loader is being made inside the loop over `{job.loader.name}` "
            f"({job.loader.where}). After a restart that loop continues in the middle, "
            "and loaders made before would be missing. Make all loaders before the "
            "epoch loop."
        )
    if job.is_in_epoch and name is None:
        raise LoopOrderError(
            f"a loader without a name is being made in epoch "
            f"{job.progress.finished_epochs}. Loaders without a name are known by the "
            "order in which they are made, which differs after a restart, when earlier "
            "epochs are skipped. Make it before the epoch loop, or give it a name= of "
            "its own in each epoch."
        )
