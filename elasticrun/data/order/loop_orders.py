"""The order of each loop over a loader, cut into global batches."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.batches import (
    MAX_INDEX,
    MAX_LISTS,
    Batches,
    CycledBatches,
    ListedBatches,
    SizedBatches,
    SizePlan,
)
from elasticrun.data.order.lanes import LanesAsSampler
from elasticrun.data.order.maps import batch_at, order_of_map
from elasticrun.data.order.permutation import Permutation
from elasticrun.data.order.plan import Order

_NUM_BATCHES_CHECKED = 20
# Begins the checksum of an order of streams, and tells how they are dealt: those of
# earlier versions are a number.
STREAMS = "blocks of streams "
_NUM_CHECKED = 1000  # Entries of a user's order that its checksum looks at.
# From the number of a batch to its indices.
Lists = Callable[[int], NDArray[np.int64]]


@dataclass(eq=False)
class SampleOrder:
    """An order of samples, cut into global batches by their size.

    Attributes:
        length: Of the whole order.
        num_samples: How much of it a loop delivers.
        plan: Samples in a global batch.
    """

    length: int
    num_samples: int
    plan: SizePlan
    _: KW_ONLY
    shuffle: bool
    drop_last: bool
    sampler: Any

    @property
    def checksum(self) -> int | str | None:
        """A checksum of entries from all over a user's sampler; None without one."""
        if self.sampler is None:
            return None
        if isinstance(self.sampler, LanesAsSampler):
            return f"{STREAMS}{self.sampler.checksum:08x}"
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
        if isinstance(self.sampler, LanesAsSampler):
            return self.sampler.keyed(key)
        if self.sampler is not None:
            return order_of_map(self.sampler, key=key)
        return Permutation(self.length, key).take if self.shuffle else _unchanged


@dataclass(eq=False)
class ListedOrder:
    """Batches that are lists of one's own; a batch is a step of the index.

    Its methods are those of `SampleOrder`.

    Attributes:
        batch_sampler: A map from a batch's number to its data-set indices.
        num_samples: How many of them a loop delivers: here it counts batches.
    """

    batch_sampler: Any
    num_samples: int
    _: KW_ONLY
    shuffle: bool
    _last: tuple[int, Lists] | None = field(default=None, init=False)

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
            number, place = divmod(number, self.num_samples)
            return of_pass(number)(place)

        return batch

    def _lists(self, key: int) -> Lists:
        """Return a loop's lists, the same ones for its sizes as for its indices."""
        if self._last is None or self._last[0] != key:
            self._last = key, self._new_lists(key)
        return self._last[1]

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
    def order(places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at places of one batch."""
        batch = lists(int(places[0]) // ListedBatches.span)
        if batch.size == 0:  # Then padding is read: the data set's first sample.
            return np.zeros_like(places)
        return batch[places % ListedBatches.span]

    return order


@dataclass(frozen=True)
class Passes:
    """The order of passes one after another, each of which has its own.

    Place p is place p mod length of pass p div length. Nothing before a place is
    computed, however many passes lie before it.

    Attributes:
        length: Of each pass.
        of_pass: Returns the order of the pass of a number.
    """

    length: int
    of_pass: Callable[[int], Any]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the data-set indices at places."""
        return self._each(places, lambda order, own: order(own))

    def _each(self, places: NDArray[np.int64], take: Any) -> NDArray[np.int64]:
        numbers, own_places = np.divmod(places, self.length)
        taken = np.empty_like(places)
        for number in np.unique(numbers):
            is_own = numbers == number
            taken[is_own] = take(self.of_pass(int(number)), own_places[is_own])
        return taken

    # Of passes over streams, as `LanesOrder` says.

    @property
    def num_lanes(self) -> int:
        return int(self.of_pass(0).num_lanes)

    def lane_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._each(places, lambda order, own: order.lane_of(own))

    def num_alike(self, place: int, size: int) -> int:
        number, own = divmod(place, self.length)
        most = max((self.length - own) // size, 1)
        return min(int(self.of_pass(number).num_alike(own, size)), most)


def _checksum(indices: NDArray[np.int64]) -> int:
    return zlib.crc32(indices.astype("<i8").tobytes())


def _unchanged(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions as they are: the data set's own order."""
    return positions
