"""The global batches of a loop, and the order of its samples.

1. Batches are three functions, whatever makes them: batch k begins at the index
   `start(k)`, has `size(k)` samples, and `number_at(index)` is the batch that begins at
   an index. The index counts samples; with the user's own `batch_sampler`, batches.
2. An order is a function from positions to indices of the data set, for many positions
   at once. A loop's key, a hash of seed, epoch and loop, gives it one.
3. Passes without end have an order each, by a key hashed from theirs and the number of
   the pass.

Price: to enter a loop anywhere costs a search among the sizes of the plan. Neither time
nor memory grow with the data set. Torch's RandomSampler draws all indices before the
first batch, and those before the place once more when a loop is to go on there.
"""

from __future__ import annotations

import functools
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from operator import index, itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.lanes import DealtLanes
from elasticrun.data.order.maps import batch_at, order_of_map
from elasticrun.data.order.permutation import MAX_INDEX, Order, Permutation

MAX_LISTS = 2**29  # Lists in a loop without end: their positions fit 62 bits.
_NUM_CHECKED = 1000  # Entries of a user's order that its checksum looks at,
_NUM_BATCHES_CHECKED = 20  # and batches of a user's own.
# Begins the checksum of an order of streams, and tells how they are dealt: those of
# earlier versions are a number.
STREAMS = "blocks of streams "

# From samples seen to the size of the batch that begins there: pairs of a number of
# samples and the size from it on, in their order; the first one begins at 0. Batches of
# one size have one pair.
SizePlan = tuple[tuple[int, int], ...]
# From the number of a batch to its indices.
Lists = Callable[[int], NDArray[np.int64]]


def check_size(name: str, value: Any) -> int:
    """Return a whole number from 1 up, or refuse what is none."""
    is_whole = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_whole or index(value) < 1:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 up.")
    return index(value)


class Batches(Protocol):
    """The global batches of one loop.

    Attributes:
        span: How many positions one step of the index stands for: 1 where the index
            counts samples. Sample j of batch k has the position start(k) * span + j.
    """

    @property
    def span(self) -> int: ...

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def start(self, number: int) -> int:
        """Return the index before a batch; of the one after the last, the end."""
        ...

    def size(self, number: int) -> int:
        """Return the samples in a batch."""
        ...

    def number_at(self, index: int) -> int:
        """Return the batch that begins at `index`, or the first one after it."""
        ...

    def num_alike(self, number: int) -> int:
        """Return how many batches of one size follow each other, this one the first.

        A lower bound, of 1 at least, will do: what is alike is computed at once.
        """
        ...


@dataclass(frozen=True)
class SizedBatches:
    """Batches whose sizes follow a plan; the last one has what is left, or is left out.

    A size holds from the first batch that begins where the plan has it, or later.

    Attributes:
        seen: Samples that the plan counts before the loop.
    """

    plan: SizePlan
    num_samples: int
    seen: int = 0
    drop_last: bool = False
    span = 1

    @cached_property
    def _stretches(self) -> list[tuple[int, int, int]]:
        """For each size: the number and the start of its first batch, and the size."""
        stretches: list[tuple[int, int, int]] = []
        for samples, size in self.plan:
            number, start = 0, 0
            if stretches:
                first, begin, before = stretches[-1]
                # The batch that is under way where the plan changes keeps its size.
                count = max(-((begin + self.seen - samples) // before), 0)
                number, start = first + count, begin + count * before
                if start == begin:
                    stretches.pop()
            stretches.append((number, start, size))
        return stretches

    def __len__(self) -> int:
        if self.num_samples == 0:
            return 0
        first, start, size = self._stretch_at(self.num_samples - 1)
        num_full, rest = divmod(self.num_samples - start, size)
        return first + num_full + (rest > 0 and not self.drop_last)

    def start(self, number: int) -> int:
        first, start, size = self._stretch_of(number)
        return min(start + (number - first) * size, self.num_samples)

    def size(self, number: int) -> int:
        return self.start(number + 1) - self.start(number)

    def number_at(self, index: int) -> int:
        if index == 0:
            return 0
        # The stretch of what lies before: an index inside a batch is the next one's.
        first, start, size = self._stretch_at(index - 1)
        return first - (start - index) // size

    def num_alike(self, number: int) -> int:
        first, start, size = self._stretch_of(number)
        ends = [later for later, _, _ in self._stretches if later > first]
        full = first + (self.num_samples - start) // size
        return max(min([full, *ends[:1]]) - number, 1)

    def planned_size(self, number: int) -> int:
        """Return the size that a batch has by the plan, also if it is the last one."""
        return self._stretch_of(number)[2]

    def _stretch_of(self, number: int) -> tuple[int, int, int]:
        at = bisect_right(self._stretches, number, key=itemgetter(0))
        return self._stretches[at - 1]

    def _stretch_at(self, index: int) -> tuple[int, int, int]:
        at = bisect_right(self._stretches, index, key=itemgetter(1))
        return self._stretches[at - 1]


@dataclass(frozen=True)
class CycledBatches:
    """One pass after another over the same batches, which do not lie across its end.

    Positions go on from pass to pass.
    """

    once: Batches
    span = 1

    def __len__(self) -> int:
        return MAX_INDEX // max(self._length, 1) * len(self.once)

    @property
    def _length(self) -> int:
        return self.once.start(len(self.once))

    def start(self, number: int) -> int:
        number, own = divmod(number, len(self.once))
        return number * self._length + self.once.start(own)

    def size(self, number: int) -> int:
        return self.once.size(number % len(self.once))

    def number_at(self, index: int) -> int:
        number, own = divmod(index, self._length)
        return number * len(self.once) + self.once.number_at(own)

    def num_alike(self, number: int) -> int:
        return self.once.num_alike(number % len(self.once))


@dataclass(frozen=True)
class ListedBatches:
    """Batches that are the user's own lists; the index counts them."""

    num_batches: int
    size_of: Callable[[int], int]
    span = 1 << 32

    def __len__(self) -> int:
        return self.num_batches

    def start(self, number: int) -> int:
        return min(number, self.num_batches)

    def size(self, number: int) -> int:
        return self.size_of(number)

    def number_at(self, index: int) -> int:
        return index

    def num_alike(self, number: int) -> int:
        del number  # Any batch may have another size than the one before it.
        return 1


@dataclass(eq=False)
class SampleOrder:
    """The order of each loop over a loader, cut into global batches by their size.

    Attributes:
        length: Of the whole order.
        num_samples: How much of it a loop delivers.
        plan: Samples in a global batch.
        sampler: The user's, as `as_map` returns it; it is the order if there is one.
        lanes: Those of a data set that is read in streams; they give the order then.
    """

    length: int
    num_samples: int
    plan: SizePlan
    _: KW_ONLY
    shuffle: bool
    drop_last: bool
    sampler: Any = None
    lanes: DealtLanes | None = None

    @property
    def checksum(self) -> int | str | None:
        """A checksum of entries from all over a user's sampler; None without one."""
        if self.lanes is not None:
            return f"{STREAMS}{self.lanes.checksum:08x}"
        if self.sampler is None:
            return None
        step = max(1, self.length // _NUM_CHECKED)
        positions = np.arange(0, self.length, step, dtype=np.int64)
        return _checksum(order_of_map(self.sampler, key=0)(positions))

    def batches(self, epoch: int, key: int = 0) -> Batches:
        """Return the batches of a loop in an epoch."""
        del key  # Their sizes depend on no order.
        seen = epoch * self.num_samples
        return SizedBatches(self.plan, self.num_samples, seen, self.drop_last)

    def order(self, key: int) -> Order:
        """Return the order of the loop that has a key."""
        return self._order(derive_seed(key, 1))

    def endless_batches(self, key: int = 0) -> Batches:
        """Return the batches of passes without end, which lie across their ends."""
        del key
        return SizedBatches(self.plan, MAX_INDEX)

    def endless_order(self, key: int) -> Order:
        """Return the order of passes without end that have a key."""
        length = self.num_samples
        if self.drop_last:
            if len(self.plan) > 1:
                raise ValueError(
                    "batches() of a loader with drop_last=True and a plan of batch "
                    "sizes: the end of each pass would depend on all passes before it. "
                    "Leave drop_last out: batches then cross the ends of passes, and "
                    "all are full."
                )
            [(_, size)] = self.plan
            length -= length % size
            if length == 0:
                raise ValueError(
                    "batches() of a loader with drop_last=True, whose "
                    f"{self.num_samples} samples are fewer than one batch of {size}, "
                    "so no pass would deliver anything. Leave drop_last out, or take "
                    "smaller batches."
                )

        return self._passes(key, length)

    def cycled(self, epoch: int, key: int) -> tuple[Batches, Order]:
        """Return the batches of one pass, again and again, each pass in a new order."""
        once = self.batches(epoch)
        return CycledBatches(once), self._passes(key, once.start(len(once)))

    def _passes(self, key: int, length: int) -> Order:
        @functools.lru_cache(maxsize=2)  # A batch may lie across the end of a pass.
        def of_pass(number: int) -> Order:
            return self._order(derive_seed(key, 1, number))

        return Passes(length, of_pass)

    def _order(self, key: int) -> Order:
        if self.lanes is not None:
            return self.lanes.order(key if self.shuffle else None)
        if self.sampler is not None:
            return order_of_map(self.sampler, key=key)
        if self.shuffle:
            return Permutation(self.length, key).take
        return lambda positions: positions  # The data set's own order.


@dataclass(eq=False)
class ListedOrder:
    """The user's own lists as batches, in the order of each loop over a loader.

    Its methods are those of `SampleOrder`; the index counts batches.

    Attributes:
        batch_sampler: A map from a batch's number to its data-set indices.
        num_samples: How many of them a loop delivers: here it counts batches.
    """

    batch_sampler: Any
    num_samples: int
    _: KW_ONLY
    shuffle: bool

    def __post_init__(self) -> None:
        # A loop's sizes and indices are asked for one after the other.
        self._lists = functools.lru_cache(maxsize=1)(self._new_lists)

    @property
    def checksum(self) -> int:
        """A checksum of some of the user's batches, from all over them."""
        own = self.batch_sampler
        own = own.keyed(0) if hasattr(own, "keyed") else own
        step = max(1, len(own) // _NUM_BATCHES_CHECKED)
        batches = [batch_at(own, number) for number in range(0, len(own), step)]
        return _checksum(np.concatenate(batches))

    def batches(self, epoch: int, key: int = 0) -> Batches:
        del epoch
        lists = self._lists(derive_seed(key, 1))
        return ListedBatches(self.num_samples, lambda number: len(lists(number)))

    def order(self, key: int) -> Order:
        return _order_of_lists(self._lists(derive_seed(key, 1)))

    def endless_batches(self, key: int = 0) -> Batches:
        lists = self._endless_lists(key)
        return ListedBatches(MAX_LISTS, lambda number: len(lists(number)))

    def endless_order(self, key: int) -> Order:
        return _order_of_lists(self._endless_lists(key))

    def cycled(self, epoch: int, key: int) -> tuple[Batches, Order]:
        del epoch
        return self.endless_batches(key), self.endless_order(key)

    def _endless_lists(self, key: int) -> Lists:
        @functools.lru_cache(maxsize=2)
        def of_pass(number: int) -> Lists:
            return self._lists(derive_seed(key, 1, number))

        def batch(number: int) -> NDArray[np.int64]:
            number_of_pass, own = divmod(number, self.num_samples)
            return of_pass(number_of_pass)(own)

        return batch

    def _new_lists(self, key: int) -> Lists:
        own = self.batch_sampler
        if hasattr(own, "keyed"):
            own = own.keyed(key)
        order = Permutation(len(own), key) if self.shuffle else range(len(own))

        @functools.lru_cache(maxsize=2)  # Its size is asked for before its indices.
        def batch(number: int) -> NDArray[np.int64]:
            return batch_at(own, order[number])

        return batch


def _order_of_lists(lists: Lists) -> Order:
    def order(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at positions in one batch."""
        batch = lists(int(positions[0]) // ListedBatches.span)
        if batch.size == 0:  # Then padding is read: the data set's first sample.
            return np.zeros_like(positions)
        return batch[positions % ListedBatches.span]

    return order


@dataclass(frozen=True)
class Passes:
    """The order of passes one after another, each of which has its own.

    Position p is position p mod length of pass p div length. Nothing before it is
    computed, however many passes lie there.

    Attributes:
        length: Of each pass.
        of_pass: Returns the order of the pass of a number.
    """

    length: int
    of_pass: Callable[[int], Any]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the data-set indices at positions."""
        return self._each(positions, lambda order, own: order(own))

    def _each(self, positions: NDArray[np.int64], take: Any) -> NDArray[np.int64]:
        numbers, in_pass = np.divmod(positions, self.length)
        taken = np.empty_like(positions)
        for number in np.unique(numbers):
            is_own = numbers == number
            taken[is_own] = take(self.of_pass(int(number)), in_pass[is_own])
        return taken

    # Of passes over streams, as `LanesOrder` says.

    @property
    def num_lanes(self) -> int:
        return int(self.of_pass(0).num_lanes)

    def lane_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._each(positions, lambda order, own: order.lane_of(own))

    def num_alike(self, position: int, size: int) -> int:
        number, own = divmod(position, self.length)
        most = max((self.length - own) // size, 1)
        return min(int(self.of_pass(number).num_alike(own, size)), most)


def _checksum(indices: NDArray[np.int64]) -> int:
    return zlib.crc32(indices.astype("<i8").tobytes())
