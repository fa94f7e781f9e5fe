"""Batches of which the replicas tell each other what samples there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from elasticrun.data.order.plan import RunningLoop
from elasticrun.data.order.shares import BatchSplit, micro_batches_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.loop import NOTHING, MicroBatch
from elasticrun.replicas.gathering import start_sums

# What was read of a micro-batch: in which of its slots there are samples, and these.
Read = tuple[list[int], Any]


class Delivery(NamedTuple):
    """How batches become what is delivered.

    Attributes:
        shares: How they were shared out.
        num_lanes: Of the streams.
        padding: Returns a batch of one sample that counts for nothing.
        sums_of: Starts to sum numbers over all replicas; returns what waits for that.
    """

    shares: BatchSplit
    num_lanes: int
    padding: Callable[[], Any]
    sums_of: Callable[[list[int]], Callable[[], list[int]]] = start_sums


def all_batches(
    loop: RunningLoop,
    in_flight: deque[MicroBatch],
    read: Iterator[Read],
    how: Delivery,
) -> Iterator[Any]:
    """Yield what was read, each batch when it has become the loop's current one.

    A batch without any sample is a boundary only. So many of them that each lane has
    had a slot there are the end.
    """
    num_empty = 0  # Slots in a row.
    for pieces, size in _summed(_global_batches(in_flight, read), how):
        micro = pieces[0].micro
        num_empty = 0 if size else num_empty + micro.part.advance
        if num_empty >= how.num_lanes:
            break
        yield from _delivered(loop, pieces if size else [], micro, size, how)
    if num_empty == loop.batches.start(micro.number + 1) - loop.batches.start(
        loop.first
    ):
        raise ElasticRunError(
            "no stream has a sample, so no loop over them can deliver anything. Look "
            "at the paths that were given."
        )


class _Piece(NamedTuple):
    micro: MicroBatch
    slots: list[int]
    batch: Any


def _global_batches(
    in_flight: deque[MicroBatch], read: Iterator[Read]
) -> Iterator[list[_Piece]]:
    """Yield the micro-batches of each global batch, with what was read of them."""
    pieces: list[_Piece] = []
    for slots, batch in read:
        micro = in_flight.popleft()
        pieces.append(_Piece(micro, slots, batch))
        if micro.part.is_step:
            yield pieces
            pieces = []


def _summed(
    batches: Iterator[list[_Piece]], how: Delivery
) -> Iterator[tuple[list[_Piece], int]]:
    """Yield the batches, and for each how many samples it has on all replicas.

    Each is read, and its sum begins, before the program gets the one before it.
    """
    before = None
    for pieces in batches:
        after = pieces, how.sums_of([sum(len(each.slots) for each in pieces)])
        if before is not None:
            yield before[0], before[1]()[0]
        before = after
    if before is not None:
        yield before[0], before[1]()[0]


def _delivered(
    loop: RunningLoop,
    pieces: list[_Piece],
    first: MicroBatch,
    size: int,
    how: Delivery,
) -> Iterator[Any]:
    """Yield the micro-batches of a global batch of so many samples."""
    if not how.shares.is_padded:
        pieces = [each for each in pieces if each.slots]
    runs = [each.slots for each in pieces]
    shares = micro_batches_of(runs, size, first.part.advance, how.shares.world_size)
    if not pieces:
        loop.current = MicroBatch(first.number, NOTHING, shares[0].part)
        yield NOTHING
    for (micro, own, batch), share in zip(pieces, shares, strict=False):
        loop.current = MicroBatch(
            micro.number,
            [micro.indices[slot] for slot in own],
            share.part,
            [micro.places[slot] for slot in own],
        )
        yield batch if own else how.padding()
