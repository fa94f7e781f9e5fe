"""Which samples of each global batch a replica reads, in which micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from elasticrun.adaptive.noise import is_measured, num_alike
from elasticrun.data.order.batches import Batches
from elasticrun.data.order.lanes import LanesOrder, UncountedLanes
from elasticrun.job.loop import MicroBatchInfo

_PADDING = range(1)  # The batch's first sample stands in for a missing one.
_Run = TypeVar("_Run", bound=Sequence[int])


def partition(positions: _Run, number: int, *, num_parts: int) -> _Run:
    """Return one of the parts that positions in the order are shared out in.

    They are cut into `num_parts` runs whose lengths differ by at most one, the longer
    ones first: a global batch among the replicas, and a replica's share into its
    micro-batches. So every part depends on nothing but these three.
    """
    length, num_longer = divmod(len(positions), num_parts)
    start = number * length + min(number, num_longer)
    part = positions[start : start + length + (number < num_longer)]
    return cast(_Run, part)  # A range of a range, a list of a list.


@dataclass(frozen=True)
class BatchSplit:
    """How every global batch of a loader is shared out; fixed for a generation.

    Attributes:
        max_local_batch_size: Samples that fit into one forward pass; None for any.
        is_padded: Whether a replica without samples gets padding (`even_batches`).
        num_virtual: Virtual replicas, which each have a share; None for one a replica.
    """

    rank: int
    world_size: int
    max_local_batch_size: int | None
    is_padded: bool
    num_virtual: int | None = None

    def num_micro(self, largest_share: int) -> int:
        """Return how many micro-batches a global batch has, at least 1.

        The largest share decides for all, so that each replica enters the same number
        of collectives.
        """
        if self.max_local_batch_size is None:
            return 1
        return max(1, -(-largest_share // self.max_local_batch_size))

    @property
    def num_shares(self) -> int:
        """In how many shares a global batch is cut."""
        return self.num_virtual or self.world_size

    @property
    def owned(self) -> range:
        """The numbers of this replica's shares."""
        return partition(range(self.num_shares), self.rank, num_parts=self.world_size)

    def even_share(self, size: int, number: int) -> range:
        """Return a share's run in a global batch of `size`, from its start."""
        return partition(range(size), number, num_parts=self.num_shares)

    def cut(self, share: Sequence[int], num_micro: int) -> list[Sequence[int]]:
        """Cut this replica's share into its micro-batches.

        With padding there are equally many on every replica, and an empty one stands
        for a padding sample.
        """
        runs = [partition(share, m, num_parts=num_micro) for m in range(num_micro)]
        return runs if self.is_padded else [run for run in runs if run]


class LocalMicroBatch(NamedTuple):
    """One of this replica's micro-batches.

    Attributes:
        places: Where its samples are, counted from the start of the global batch.
        lanes: Which of this replica's lanes each of them is in, if lanes share it out.
    """

    places: Sequence[int]
    part: MicroBatchInfo
    lanes: Sequence[int] = ()


class MicroBatchCounts(Protocol):
    """Into how many micro-batches each global batch of a loop is cut."""

    def num_micro(self, number: int) -> int:
        """Return how many micro-batches a global batch has, at least 1."""
        ...

    def num_alike(self, number: int) -> int:
        """Return how many batches are cut alike, this one the first.

        It may be a lower bound, from 1 on, which only costs time.
        """
        ...


class LoopShares(MicroBatchCounts, Protocol):
    """What this replica reads of each global batch of a loop."""

    def of_batch(self, number: int) -> list[LocalMicroBatch]:
        """Return its micro-batches of a global batch, at least one.

        A single one without places stands for a batch of which it reads nothing.
        """
        ...


def micro_batches_of(
    runs: Sequence[Sequence[int]],
    size: int,
    advance: int,
    world_size: int,
    *,
    padding: Sequence[int] = _PADDING,
) -> list[LocalMicroBatch]:
    """Return the shares that read the places in runs of a global batch.

    Args:
        padding: What is read for an empty run.
    """
    if not runs:
        return [
            LocalMicroBatch((), MicroBatchInfo(0, 0, 0, size, True, 0, advance, 0.0))
        ]
    local_size = sum(map(len, runs))
    return [
        LocalMicroBatch(
            run or padding,
            MicroBatchInfo(
                micro=micro,
                num_valid=len(run),
                local_batch_size=local_size,
                global_batch_size=size,
                is_step=micro == len(runs) - 1,
                num_read=len(run or padding),
                advance=advance,
                weight=len(run) * world_size / max(size, 1),
            ),
        )
        for micro, run in enumerate(runs)
    ]


def own_micro_batches(
    shares: BatchSplit,
    share_of: Callable[[int], Sequence[int]],
    size: int,
    advance: int,
    num_micro: int,
    *,
    is_member: bool,
    padding: Sequence[int] = _PADDING,
) -> list[LocalMicroBatch]:
    """Return this replica's micro-batches of a global batch.

    Args:
        share_of: Returns the places of the share of a number.
        is_member: Whether other loaders deliver in the same steps.
        padding: As of `micro_batches_of`.
    """
    if shares.num_virtual is not None:
        return _virtual_micro_batches(
            shares, share_of, size, advance, num_micro, keeps_empty=is_member
        )
    runs = shares.cut(share_of(shares.rank), num_micro)
    return micro_batches_of(runs, size, advance, shares.world_size, padding=padding)


def _virtual_micro_batches(
    shares: BatchSplit,
    share_of: Callable[[int], Sequence[int]],
    size: int,
    advance: int,
    num_micro: int,
    *,
    keeps_empty: bool,
) -> list[LocalMicroBatch]:
    """Return those of the virtual replicas that this process trains, one by one.

    Each is cut as it is at any other number of processes. Those without samples are
    left out. A process that has no others trains the first one's samples, as padding: a
    layer like BatchNorm may need more than one.

    Args:
        share_of: Returns the places of the share of a number.
        keeps_empty: Whether none is left out: other loaders may have samples in it.
    """
    num_shares = shares.num_shares

    def pieces(share: int) -> list[Sequence[int]]:
        own = share_of(share)
        cut = [partition(own, m, num_parts=num_micro) for m in range(num_micro)]
        return [piece for piece in cut if piece or keeps_empty]

    runs = [(share, piece) for share in shares.owned for piece in pieces(share)]
    found = micro_batches_of([run for _, run in runs], size, advance, num_shares)
    if runs:
        numbers = [share for share, _ in runs]
    elif not shares.is_padded:
        return found  # Of which it reads nothing.
    else:
        padding = (pieces(0) or [_PADDING])[0]
        found = micro_batches_of([range(0)], size, advance, num_shares, padding=padding)
        is_empty = shares.rank == 0 and not size  # The whole batch.
        numbers = [0 if is_empty else -1]
    return [
        share._replace(part=share.part._replace(share=number))
        for share, number in zip(found, numbers, strict=True)
    ]


@dataclass(frozen=True)
class CountsForNoise:
    """Cuts the batches of which the noise of gradients is measured, at least in two."""

    batches: Batches
    shares: MicroBatchCounts

    def num_micro(self, number: int) -> int:
        num_micro = self.shares.num_micro(number)
        if is_measured(number) and self.batches.size(number) > 1:
            return max(num_micro, 2)
        return num_micro

    def num_alike(self, number: int) -> int:
        return min(self.shares.num_alike(number), num_alike(number))


@dataclass(frozen=True)
class EvenShares:
    """Runs of neighbours whose lengths differ by at most one.

    Attributes:
        cuts: Those of the loaders that deliver in the same steps, if there are any:
            batch k is then delivered in step k.
    """

    batches: Batches
    shares: BatchSplit
    cuts: MicroBatchCounts | None = None

    def of_batch(self, number: int) -> list[LocalMicroBatch]:
        size = self.batches.size(number)
        advance = self.batches.start(number + 1) - self.batches.start(number)
        num_micro = (self.cuts or self).num_micro(number)
        share_of = partial(self.shares.even_share, size)
        is_member = self.cuts is not None
        return own_micro_batches(
            self.shares, share_of, size, advance, num_micro, is_member=is_member
        )

    def num_micro(self, number: int) -> int:
        size = self.batches.size(number)
        return self.shares.num_micro(-(-size // self.shares.num_shares))

    def num_alike(self, number: int) -> int:
        count = self.batches.num_alike(number)
        return count if self.cuts is None else min(count, self.cuts.num_alike(number))


@dataclass(frozen=True)
class LaneShares:
    """The samples of a replica's lanes: lane l is that of share l mod their number.

    Shares differ by more than one sample. With at least as many lanes as samples in a
    batch they are nearly even. Where there are fewer lanes than shares, each replica
    reads every lane, and a share is a run of neighbours of each global batch.

    Attributes:
        cuts: As of `EvenShares`.
        lanes: Those of the loop.
    """

    batches: Batches
    shares: BatchSplit
    cuts: MicroBatchCounts | None
    lanes: LanesOrder

    def of_batch(self, number: int) -> list[LocalMicroBatch]:
        size = self.batches.size(number)
        lanes = self._lanes_of(number)
        num_shares, owned = self.shares.num_shares, self.shares.owned
        num_micro = (self.cuts or self).num_micro(number)

        def share_of(share: int) -> Sequence[int]:
            if self._are_shared:
                return self.shares.even_share(size, share)
            places: list[int] = np.flatnonzero(lanes % num_shares == share).tolist()
            return places

        found = own_micro_batches(
            self.shares,
            share_of,
            size,
            size,
            num_micro,
            is_member=self.cuts is not None,
            padding=() if isinstance(self.lanes, UncountedLanes) else _PADDING,
        )
        if not self._are_shared:  # Then number this replica's own.
            rounds, share = np.divmod(lanes, num_shares)
            lanes = rounds * len(owned) + share - owned.start
        return [
            share._replace(lanes=lanes[list(share.places)].tolist()) for share in found
        ]

    def num_micro(self, number: int) -> int:
        num_shares = self.shares.num_shares
        if self._are_shared:
            return self.shares.num_micro(-(-self.batches.size(number) // num_shares))
        owners = self._lanes_of(number) % num_shares
        return self.shares.num_micro(int(np.bincount(owners).max()))

    def num_alike(self, number: int) -> int:
        place, size = self.batches.start(number), self.batches.size(number)
        count = min(self.batches.num_alike(number), self.lanes.num_alike(place, size))
        return count if self.cuts is None else min(count, self.cuts.num_alike(number))

    @property
    def _are_shared(self) -> bool:
        return self.lanes.num_lanes < self.shares.num_shares

    def _lanes_of(self, number: int) -> NDArray[np.int64]:
        """Return the lane of each sample of a global batch."""
        places = self.batches.start(number) + np.arange(self.batches.size(number))
        return self.lanes.lane_of(places)
