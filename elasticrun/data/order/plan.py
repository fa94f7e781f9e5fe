"""One loop over a loader: the plan of what this replica reads, and where it is.

A plan is made of requests, one for each micro-batch:

1. Take the next global batch, and those behind it that are shared out alike, of at most
   8192 samples here: an index costs little where thousands are computed at once.
2. Add the places of this replica's samples, which are the same in each of them, to the
   starts of these batches: their positions.
3. The order gives the indices at all positions, which are split into micro-batches.
4. Where reading is seeded, each position has a seed, hashed from the loop's key.

Price: 3 us for a batch of 32, at any index of any data set. To ask the order for each
batch by itself takes 75.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds
from elasticrun.data.order.batches import Batches, SizedBatches
from elasticrun.data.order.permutation import Order
from elasticrun.data.order.shares import LocalMicroBatch, LoopShares
from elasticrun.job.loop import NOTHING, LoopStart, MicroBatch, MicroBatchInfo

_CHUNK = 8192  # Positions whose indices are computed at once.

# Splits data-set indices into pieces of the given lengths, as what reads wants them.
SplitIndices = Callable[[NDArray[np.int64], list[int]], Iterable[Any]]


class Seeding(NamedTuple):
    """What the random draws of data-set items depend on, beside the position.

    Attributes:
        key: 64 bits of the loop.
        each_sample: Whether each sample has a seed, or each micro-batch one.
    """

    key: int
    each_sample: bool


def as_lists(indices: NDArray[np.int64], lengths: list[int]) -> Iterator[list[int]]:
    """Split into lists of integers, which every data set can read."""
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
        first: The number of the batch to begin with.
        end: That of the batch before which to end.
        seeding: How the draws of each micro-batch are seeded; None to ask for the plain
            indices.
        split: In which form the indices are asked for.
        names_lanes: Whether the replica's lane of each sample is asked for with it.
        asks_for_nothing: Whether there is a request, too, where nothing is to be read.
    """

    batches: Batches
    shares: LoopShares
    order: Order
    _: KW_ONLY
    first: int
    end: int
    seeding: Seeding | None = None
    split: SplitIndices = as_lists
    names_lanes: bool = False
    asks_for_nothing: bool = False
    in_flight: deque[MicroBatch] = field(default_factory=deque, init=False)

    def __iter__(self) -> Iterator[Any]:
        number = self.first
        while number < self.end:
            shares = self.shares.of_batch(number)
            most = max(1, _CHUNK // max(1, shares[0].part.local_batch_size))
            count = min(self.shares.num_alike(number), most, self.end - number)
            yield from self._requests(range(number, number + count), shares)
            number += count

    def _requests(self, numbers: range, shares: list[LocalMicroBatch]) -> Iterator[Any]:
        """Yield what is asked for of batches that are shared out alike."""
        # Other replicas may have all samples of these batches.
        parts = [share.part for share in shares]
        lengths = [part.num_read for part in parts]
        if not any(lengths) and not self.asks_for_nothing:
            self.in_flight.extend(
                MicroBatch(number, NOTHING, parts[0]) for number in numbers
            )
            return

        # The positions of all this replica's samples in them, a row a batch, and what
        # is at these positions.
        own = [place for share in shares for place in share.places]
        begin = self.batches.start(numbers[0])
        steps = np.arange(len(numbers), dtype=np.int64) * parts[0].advance
        starts = (begin + steps) * self.batches.span
        positions = (starts[:, None] + np.asarray(own, dtype=np.int64)).ravel()
        pieces = iter(self.split(self.order(positions), lengths * len(numbers)))
        seeds: list[int] = []
        if self.seeding is not None:
            seeds = derive_seeds(self.seeding.key, positions).tolist()

        # One request a micro-batch, in the form that `BatchReader` describes.
        asked = 0  # Positions, of those above.
        for number in numbers:
            for share in shares:
                part = share.part
                indices = next(pieces)
                places = share.places if share.lanes else ()
                self.in_flight.append(MicroBatch(number, indices, part, places))
                if self.seeding is None:
                    yield indices
                    continue
                own_seeds = seeds[asked : asked + part.num_read]
                asked += part.num_read
                if self.names_lanes:
                    yield indices, own_seeds, share.lanes
                else:
                    yield (
                        indices,
                        own_seeds if self.seeding.each_sample else own_seeds[0],
                    )


_NO_BATCHES = SizedBatches(((0, 1),), 0)
NO_BATCH = MicroBatch(0, [], MicroBatchInfo(0, 0, 0, 0, True, 0, 0, 1.0))


def end_nothing() -> None:
    """Stand for `RunningLoop.end_reading` where nothing reads."""


@dataclass(slots=True, eq=False)
class RunningLoop:
    """All that changes while a loop runs.

    Not attributes of the loader, which torch guards against being set.

    Attributes:
        start: Where in the job it began; None outside of loops.
        order: Of its samples, once it is read; a combined loader's has none.
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
    order: Order | None = None
    first: int = 0
    begin: int = 0
    num_batches: int | None = None
    key: int = 0
    part_of: str = ""
    current: MicroBatch = NO_BATCH
    end_reading: Callable[[], None] = end_nothing
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
        begin = self.batches.start(self.current.number)
        return begin - self.batches.start(self.first)


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


def loop_key(seed: int, epoch: int, loop: int, inside: tuple[int, ...] = ()) -> int:
    """Return the 64 bits that everything random in one loop depends on.

    Args:
        inside: What tells a loop in the body of another one from the others there.
    """
    return derive_seed(seed, epoch, loop, *inside)


def passes_key(seed: int, name: str) -> int:
    """Return the 64 bits that all endless passes of the loader of a name depend on."""
    return derive_seed(seed, zlib.crc32(name.encode()))
