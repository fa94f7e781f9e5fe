"""Where each global batch begins in an order, and its size: three functions.

A position counts the *index* of a loop: samples, or batches if the user gives lists of
samples. `start(k)` is the index at which batch k begins, `size(k)` the number of
samples in it, and `number_at(index)` the batch that begins at an index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import index, itemgetter
from typing import Any, Protocol

MAX_INDEX = 2**61  # Of a loop without end; what is derived from it fits 64 bits.
MAX_LISTS = 2**29  # Batches of such a loop that are lists: places fit 62 bits.

# From samples seen to the size of the batch that begins there: pairs of a number of
# samples and the size from it on, in their order; the first one begins at 0. Batches of
# one size have one pair.
SizePlan = tuple[tuple[int, int], ...]


def check_size(name: str, value: Any) -> int:
    """Return a whole number from 1 up, or refuse what is none."""
    is_whole = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_whole or index(value) < 1:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 up.")
    return index(value)


class Batches(Protocol):
    """The global batches of one loop.

    Attributes:
        span: How many places in the order one step of the index stands for: 1 where
            the index counts samples. Sample j of batch k has the place
            start(k) * span + j.
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

        At least 1; fewer than there are cost time only.
        """
        ...


@dataclass(frozen=True)
class SizedBatches:
    """Batches whose sizes follow a plan; the last one has what is left, or is left out.

    A size holds from the first batch that begins at its place in the plan or later.

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
            place = max(samples - self.seen, 0)
            number, start = 0, 0
            if stretches:
                first, begin, before = stretches[-1]
                count = -(-(place - begin) // before) if place > begin else 0
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

    Places in the order go on from pass to pass.
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
    """Batches that are lists of one's own; the index counts them."""

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
