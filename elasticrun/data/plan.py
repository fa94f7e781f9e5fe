"""The plan of one loop: which samples this replica reads in which micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.data.partition import (
    global_batch,
    micro_batch,
    num_global_batches,
    num_micro_batches,
    partition,
)
from elasticrun.data.reading import Request
from elasticrun.data.seeding import derive_seed, derive_seeds

_CHUNK = 8192  # Positions whose indices are computed at once.
_PADDING = range(1)  # The batch's first sample stands in for a missing one.

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class Part(NamedTuple):
    """A micro-batch's place in its global batch, the same in every batch of that size.

    Attributes:
        micro: Number of the micro-batch in this replica's local batch.
        num_valid: How many of its samples are real, and not padding.
        local_batch_size: Samples of this replica in the global batch.
        global_batch_size: Samples of all replicas in it.
        is_step: Whether the global batch is complete after this one.
    """

    micro: int
    num_valid: int
    local_batch_size: int
    global_batch_size: int
    is_step: bool


# Number of the global batch in the loop, data-set indices with padding, and its part. A
# plain tuple, since one is made for every batch; without indices nothing is delivered.
MicroBatch = tuple[int, list[int], Part]


@dataclass(frozen=True)
class Shares:
    """How every global batch of a loader is shared out; fixed for a generation.

    Attributes:
        num_samples: Samples in the whole order.
        batch_size: Samples in a global batch.
        is_padded: Whether a replica without samples gets padding (`even_batches`).
    """

    num_samples: int
    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    max_local_batch_size: int | None
    is_padded: bool

    @property
    def num_batches(self) -> int:
        """Global batches in a whole loop."""
        return num_global_batches(
            self.num_samples, self.batch_size, drop_last=self.drop_last
        )

    def size_of_batch(self, number: int) -> int:
        """Return the samples in one global batch."""
        return len(global_batch(number, self.num_samples, self.batch_size))

    def micro_batches(self, size: int) -> list[range]:
        """Return this replica's runs in a global batch of `size`, from its start.

        With padding there are equally many on every replica, and an empty one stands
        for a padding sample.
        """
        share = partition(0, size, rank=self.rank, world_size=self.world_size)
        num_micro = num_micro_batches(
            size,
            world_size=self.world_size,
            max_local_batch_size=self.max_local_batch_size,
        )
        runs = [micro_batch(share, m, num_micro=num_micro) for m in range(num_micro)]
        return runs if self.is_padded else [run for run in runs if run]


class Seeding(NamedTuple):
    """What the random draws of data-set items depend on, beside the position.

    Attributes:
        key: 64 bits of the loop.
        each_sample: Whether each sample has a seed, or each micro-batch one.
    """

    key: int
    each_sample: bool


class LoopPlan:
    """A batch sampler over one loop, from any index on; O(1) in the data set's length.

    Iterating yields what a DataLoader is asked for, and appends to `in_flight` what
    will come out. A global batch without any sample for this replica is in flight only.

    Args:
        order: Maps positions to data-set indices.
        index: Samples of the loop that were consumed before.
        seeding: How the draws of each micro-batch are seeded; None to ask for the plain
            indices.
    """

    def __init__(
        self,
        shares: Shares,
        order: Order,
        *,
        index: int,
        seeding: Seeding | None,
    ) -> None:
        self._shares = shares
        self._order = order
        self._seeding = seeding
        self.first_batch = -(-index // shares.batch_size)
        self.in_flight: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int] | Request]:
        shares = self._shares
        num_full = shares.num_samples // shares.batch_size
        per_chunk = max(1, _CHUNK // -(-shares.batch_size // shares.world_size))
        start = self.first_batch
        while start < shares.num_batches:
            stop = start + 1
            if start < num_full:
                stop = min(start + per_chunk, num_full)
            yield from self._run_of_batches(start, stop)
            start = stop

    def _run_of_batches(self, start: int, stop: int) -> Iterator[list[int] | Request]:
        """Yield batches of one size, with one computation of their indices."""
        size = self._shares.size_of_batch(start)
        runs = self._shares.micro_batches(size)
        if not runs:
            self._skip(start, stop, size)
            return
        positions = self._positions(start, stop, runs)
        indices = self._order(positions).tolist()
        parts = _parts(runs, size)
        if self._seeding is None:
            yield from self._asked_for(start, stop, parts, indices)
            return
        seeds = derive_seeds(self._seeding.key, positions).tolist()
        begin = 0
        for own in self._asked_for(start, stop, parts, indices):
            end = begin + len(own)
            yield own, seeds[begin:end] if self._seeding.each_sample else seeds[begin]
            begin = end

    def _asked_for(
        self,
        start: int,
        stop: int,
        parts: list[tuple[Part, int]],
        indices: list[int],
    ) -> Iterator[list[int]]:
        in_flight = self.in_flight
        begin = 0
        for batch in range(start, stop):
            for part, length in parts:
                end = begin + length
                own = indices[begin:end]
                in_flight.append((batch, own, part))
                yield own
                begin = end

    def _positions(self, start: int, stop: int, runs: list[range]) -> NDArray[np.int64]:
        own = [position for run in runs for position in (run or _PADDING)]
        size = self._shares.batch_size
        starts = np.arange(start * size, stop * size, size, dtype=np.int64)
        return (starts[:, None] + np.asarray(own, dtype=np.int64)).ravel()

    def _skip(self, start: int, stop: int, size: int) -> None:
        nothing = Part(0, 0, 0, size, True)
        self.in_flight.extend((batch, [], nothing) for batch in range(start, stop))


def _parts(runs: list[range], size: int) -> list[tuple[Part, int]]:
    """Return each run's part and how many indices are read for it, padding included."""
    local_size = sum(map(len, runs))
    last = len(runs) - 1
    return [
        (Part(micro, len(run), local_size, size, micro == last), len(run) or 1)
        for micro, run in enumerate(runs)
    ]


def loop_key(seed: int, epoch: int, loop: int) -> int:
    """Return the 64 bits that everything random in one loop depends on."""
    return derive_seed(seed, epoch, loop)
