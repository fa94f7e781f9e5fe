"""One running loop: where it began, its current batch, how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from threading import get_ident
from typing import Any

import torch

from elasticrun.data.order.batches import Batches, SizedBatches
from elasticrun.data.streams.streams import InLanes
from elasticrun.job.loop import NOTHING, MicroBatch, Part
from elasticrun.job.open_loop import LoopStart
from elasticrun.job.trace import Trace
from elasticrun.job.virtual import VirtualReplicas

_NO_BATCHES = SizedBatches(((0, 1),), 0)
NO_BATCH = MicroBatch(0, [], Part(0, 0, 0, 0, True, 0, 0, 1.0))


def _nothing() -> None:
    """End what does not read."""


@dataclass(slots=True, eq=False)
class RunningLoop:
    """All that changes while a loop runs.

    Not attributes of the loader, which torch guards against being set.

    Attributes:
        start: Where in the job it began; None outside of loops.
        first: The number of its first batch, had it not been interrupted.
        begin: The number of the one with which it goes on.
        num_batches: How many it has; None without an end.
        key: What everything random in it depends on.
        part_of: The name of the combined loader in whose loop it is a part.
        end_reading: Ends what reads its batches, perhaps in workers.
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
    end_reading: Callable[[], None] = _nothing
    thread: int = field(default_factory=get_ident)

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
        return self.batches.start(self.current.number) - self.batches.start(self.first)


def delivered(
    loop: RunningLoop, in_flight: deque[MicroBatch], batches: Iterator[Any]
) -> Iterator[Any]:
    """Yield what was read, each batch when it has become the loop's current one.

    `NOTHING` stands for a global batch of which all samples are other replicas': it has
    its boundary here, too, so that all replicas count the same ones.
    """
    for batch in batches:
        while in_flight[0].indices is NOTHING:
            loop.current = in_flight.popleft()
            yield NOTHING
        loop.current = in_flight.popleft()
        yield batch
    while in_flight:
        loop.current = in_flight.popleft()
        yield NOTHING


def by_share(
    virtual: VirtualReplicas, loop: RunningLoop, batches: Iterator[Any]
) -> Iterator[Any]:
    """Yield the batches, each when what the body draws depends on its share alone."""
    for batch in batches:
        virtual.begin_share(loop.key, loop.current)
        yield batch


def shown(loop: RunningLoop, batches: Iterator[Any], bar: Any) -> Iterator[Any]:
    """Yield the batches; a bar moves on after each global one."""
    try:
        for batch in batches:
            try:
                yield batch
            finally:  # Also if the loop ends with it.
                bar.total = loop.num_batches  # Which sizes that are decided change.
                bar.update(loop.current.part.is_step)
    finally:
        bar.close()


def trace_batch(
    trace: Trace,
    loop: RunningLoop,
    dataset: Any,
    *,
    batch: int,
    member: str | None = None,
) -> None:
    """Write that a micro-batch is delivered."""
    start = loop.start
    assert start is not None
    _, indices, part, places = loop.current
    if isinstance(indices, torch.Tensor):
        indices = indices.tolist()
    has_streams = isinstance(dataset, InLanes)
    trace.write(
        epoch=start.epoch,
        loop=start.num_loops,
        inside=start.inside,
        batch=batch,
        micro=part.micro,
        indices=indices,
        num_valid=part.num_valid,
        places=places,
        streams=[dataset.place(index) for index in indices] if has_streams else (),
        member=member,
    )
