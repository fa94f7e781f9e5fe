"""The plan of one loop: which samples this replica reads in which micro-batch."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds
from elasticrun.data.order.batches import Batches
from elasticrun.data.order.partition import Shares
from elasticrun.data.order.together import Together
from elasticrun.job.loop import MicroBatch, Part

_CHUNK = 8192  # Positions whose indices are computed at once.
_PADDING = range(1)  # The batch's first sample stands in for a missing one.

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]

# Cuts data-set indices into pieces of the given lengths, for what reads them.
Cut = Callable[[NDArray[np.int64], list[int]], Iterable[Any]]


NOTHING: list[int] = []  # The indices where a replica has no sample; none is delivered.


class Seeding(NamedTuple):
    """What the random draws of data-set items depend on, beside the position.

    Attributes:
        key: 64 bits of the loop.
        each_sample: Whether each sample has a seed, or each micro-batch one.
    """

    key: int
    each_sample: bool


def as_lists(indices: NDArray[np.int64], lengths: list[int]) -> Iterator[list[int]]:
    """Cut into lists of integers, which every data set can read."""
    numbers = indices.tolist()
    begin = 0
    for length in lengths:
        yield numbers[begin : begin + length]
        begin += length


@dataclass(eq=False)
class LoopPlan:
    """A batch sampler over one loop, from any index on; O(1) in the data set's length.

    Iterating yields what a DataLoader is asked for, and appends to `in_flight` what
    will come out; with workers torch asks ahead, in the training thread. A global batch
    without any sample for this replica is in flight only.

    Attributes:
        batches: The global batches of the loop.
        order: Maps positions to data-set indices.
        first: The number of the batch to begin with.
        end: That of the batch before which to end.
        seeding: How the draws of each micro-batch are seeded; None to ask for the plain
            indices.
        cut: In which form the indices are asked for.
        together: The loaders that deliver in the same steps, if there are any: batch k
            is then delivered in step k.
    """

    batches: Batches
    shares: Shares
    order: Order
    _: KW_ONLY
    first: int
    end: int
    seeding: Seeding | None = None
    cut: Cut = as_lists
    together: Together | None = None
    in_flight: deque[MicroBatch] = field(default_factory=deque, init=False)

    def __iter__(self) -> Iterator[Any]:
        number = self.first
        while number < self.end:
            share = -(-self.batches.size(number) // self.shares.world_size)
            most = min(max(1, _CHUNK // share), self.end - number)
            count = min(self.batches.num_alike(number), most)
            if self.together is not None:
                count = min(count, self.together.num_alike(number))
            yield from self._run_of_batches(number, count)
            number += count

    def _run_of_batches(self, first: int, count: int) -> Iterator[Any]:
        """Yield batches of one size, with one computation of their indices."""
        size = self.batches.size(first)
        begin = self.batches.start(first)
        advance = self.batches.start(first + 1) - begin
        numbers = range(first, first + count)
        if self.together is None:
            num_micro = self.shares.num_micro(size)
        else:
            num_micro = self.together.num_micro(first)
        runs = self.shares.micro_batches(size, num_micro)
        if not runs:
            nothing = Part(0, 0, 0, size, True, 0, advance)
            self.in_flight.extend((number, NOTHING, nothing) for number in numbers)
            return
        own = [position for run in runs for position in (run or _PADDING)]
        span = self.batches.span
        starts = (begin + np.arange(count, dtype=np.int64) * advance) * span
        positions = (starts[:, None] + np.asarray(own, dtype=np.int64)).ravel()
        parts = _parts(runs, size, advance)
        lengths = [part.num_read for part in parts]
        cut = self.cut(self.order(positions), lengths * count)
        asked = self._in_flight(numbers, parts, iter(cut))
        if self.seeding is None:
            yield from asked
            return
        seeds = derive_seeds(self.seeding.key, positions).tolist()
        begin = 0
        for indices in asked:
            end = begin + len(indices)
            yield (
                indices,
                seeds[begin:end] if self.seeding.each_sample else seeds[begin],
            )
            begin = end

    def _in_flight(
        self, numbers: range, parts: list[Part], pieces: Iterator[Any]
    ) -> Iterator[Any]:
        in_flight = self.in_flight
        for number in numbers:
            for part in parts:
                indices = next(pieces)
                in_flight.append((number, indices, part))
                yield indices


def _parts(runs: list[range], size: int, advance: int) -> list[Part]:
    """Return the part of each of a replica's runs in a global batch of `size`."""
    local_size = sum(map(len, runs))
    last = len(runs) - 1
    return [
        Part(
            micro=micro,
            num_valid=len(run),
            local_batch_size=local_size,
            global_batch_size=size,
            is_step=micro == last,
            num_read=len(run) or 1,
            advance=advance,
        )
        for micro, run in enumerate(runs)
    ]


def loop_key(seed: int, epoch: int, loop: int, inside: tuple[int, ...] = ()) -> int:
    """Return the 64 bits that everything random in one loop depends on.

    Args:
        inside: What tells a loop in the body of another one from the others there.
    """
    return derive_seed(seed, epoch, loop, *inside)


def passes_key(seed: int, name: str) -> int:
    """Return the 64 bits that all endless passes of the loader of a name depend on."""
    return derive_seed(seed, zlib.crc32(name.encode()))
