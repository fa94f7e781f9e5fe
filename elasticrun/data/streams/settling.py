"""Batches whose size the replicas must agree on before they are delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from elasticrun.data.order.plan import RunningLoop
from elasticrun.data.order.shares import Shares, shares_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.loop import NOTHING, MicroBatch
from elasticrun.replicas.gathering import start_sum

# What was read of a micro-batch: in which of its slots there are samples, and these.
Read = tuple[list[int], Any]


class Settling(NamedTuple):
    """How batches become what is delivered.

    Attributes:
        shares: How they were shared out.
        drop_last: Whether the loop ends before the first one that is not full.
        num_lanes: Of the streams.
        padding: Returns a batch of one sample that counts for nothing.
        sum_of: Starts to sum a number over all replicas; returns what waits for that.
    """

    shares: Shares
    drop_last: bool
    num_lanes: int
    padding: Callable[[], Any]
    sum_of: Callable[[int], Callable[[], int]] = start_sum


def settled(
    loop: RunningLoop,
    in_flight: deque[MicroBatch],
    read: Iterator[Read],
    how: Settling,
) -> Iterator[Any]:
    """Yield what was read, each batch when it has become the loop's current one.

    A batch without any sample is a boundary only. So many of them that each lane has
    had a slot there are the end.
    """
    num_empty = 0  # Slots in a row.
    for pieces, wait in _summed(_global_batches(in_flight, read), how):
        micro, size = pieces[0].micro, wait()
        num_empty = 0 if size else num_empty + micro.part.advance
        if num_empty >= how.num_lanes:
            break
        if how.drop_last and size < micro.part.global_batch_size:
            return
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
    batches: Iterator[list[_Piece]], how: Settling
) -> Iterator[tuple[list[_Piece], Callable[[], int]]]:
    """Yield the batches, and for each what waits for the number of its samples.

    Each is read, and its sum begins, before the program gets the one before it.
    """
    before = None
    for pieces in batches:
        after = pieces, how.sum_of(sum(len(each.slots) for each in pieces))
        if before is not None:
            yield before
        before = after
    if before is not None:
        yield before


def _delivered(
    loop: RunningLoop,
    pieces: list[_Piece],
    first: MicroBatch,
    size: int,
    how: Settling,
) -> Iterator[Any]:
    """Yield the micro-batches of a global batch of so many samples."""
    if not how.shares.is_padded:
        pieces = [each for each in pieces if each.slots]
    runs = [each.slots for each in pieces]
    shares = shares_of(runs, size, first.part.advance, how.shares.world_size)
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
