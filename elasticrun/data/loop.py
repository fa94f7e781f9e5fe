"""One loop while it runs: where it began, what it delivers now, how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from elasticrun.data.order.batches import Batches, SizedBatches
from elasticrun.data.order.plan import NOTHING
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import MicroBatch, Part
from elasticrun.job.progress import Progress
from elasticrun.job.trace import Trace

# How a loop ends: by itself, by `break`, by an exception in its body, or by one in what
# delivers it.
LoopEnding = Literal["over", "break", "exception", "failed"]

_NO_BATCHES = SizedBatches(((0, 1),), 0)
NO_BATCH: MicroBatch = (0, [], Part(0, 0, 0, 0, True, 0, 0))


class LoopStart(NamedTuple):
    """Where a loop begins.

    Attributes:
        epoch: The epochs that are finished.
        num_loops: The loops that are finished since the last epoch was.
        inside: What tells it from others in the same body; empty outside of loops.
        at: The index at which it goes on, 0 unless it was interrupted.
        offset: Of a loop over endless passes, where in these its index 0 is; None of
            one over a single pass.
    """

    epoch: int
    num_loops: int
    inside: tuple[int, ...]
    at: int
    offset: int | None


class InnerCounter:
    """Counts the index of a loop in the body of another one: no part of a position."""

    def __init__(self) -> None:
        self.index = 0

    def advance(self, num: int) -> None:
        self.index += num


def _reach_nothing() -> None:
    """Be the boundary of a loop that has none: it belongs to the batch around it."""


@dataclass(slots=True, eq=False)
class RunningLoop:
    """All that changes while a loop runs.

    Not attributes of the loader, which torch guards against being set.

    Attributes:
        where: Where the loop stands in the program.
        start: Where in the job it began; None outside of loops.
        batches: Its global batches.
        first: The number of its first batch, had it not been interrupted.
        begin: The number of the one with which it goes on.
        num_batches: How many it has; None without an end.
        key: What everything random in it depends on.
        part_of: The name of the combined loader in whose loop it is a part.
        current: The current micro-batch.
        bar: Shows how far it has come.
        reading: What reads its batches, perhaps in workers.
        counter: Counts its index: the job's progress, unless it is inside another loop.
        reach: Called after each global batch: the job's boundary, likewise.
    """

    where: str = "no loop"
    start: LoopStart | None = None
    batches: Batches = _NO_BATCHES
    _: KW_ONLY
    first: int = 0
    begin: int = 0
    num_batches: int | None = None
    key: int = 0
    part_of: str = ""
    current: MicroBatch = NO_BATCH
    bar: Any = None
    reading: Iterator[Any] = field(default_factory=lambda: iter(()))
    counter: Progress | InnerCounter = field(default_factory=InnerCounter)
    reach: Callable[[], None] = _reach_nothing

    @property
    def part(self) -> Part:
        return self.current[2]

    @property
    def is_endless(self) -> bool:
        """Whether its passes are without end, of which it may take a number."""
        return self.start is not None and self.start.offset is not None

    @property
    def end(self) -> int:
        """The number of the batch before which it ends."""
        if self.num_batches is None:
            return len(self.batches)
        return self.first + self.num_batches

    @property
    def index(self) -> int:
        """Its index before the current batch."""
        return self.batches.start(self.current[0]) - self.batches.start(self.first)

    def enter(self, job: Job, bar: Any) -> None:
        """Let the job's position be in this loop, and its global batches end there."""
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
        self.bar.update()
        current_job().boundary.reach()


def trace_batch(
    trace: Trace, loop: RunningLoop, *, batch: int, member: str | None = None
) -> None:
    """Write that a micro-batch is delivered.

    Args:
        batch: The number of its global batch in the loop.
        member: Of a combined loader, whose micro-batch it is.
    """
    start = loop.start
    assert start is not None
    _, indices, part = loop.current
    trace.write(
        epoch=start.epoch,
        loop=start.num_loops,
        inside=start.inside,
        batch=batch,
        micro=part.micro,
        indices=indices.tolist() if isinstance(indices, torch.Tensor) else indices,
        num_valid=part.num_valid,
        member=member,
    )
