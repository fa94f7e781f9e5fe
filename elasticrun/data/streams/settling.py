"""Batches that are delivered once all replicas know how many samples they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from elasticrun.data.loop import RunningLoop
from elasticrun.data.order.partition import Shares
from elasticrun.data.order.shares import shares_of
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
        padding: Returns a batch of one sample that counts for nothing.
        sum_of: Starts to sum a number over all replicas; returns what waits for that.
    """

    shares: Shares
    drop_last: bool
    padding: Callable[[], Any]
    sum_of: Callable[[int], Callable[[], int]] = start_sum


def settled(
    loop: RunningLoop,
    in_flight: deque[MicroBatch],
    read: Iterator[Read],
    how: Settling,
) -> Iterator[Any]:
    """Yield what was read, each batch when it has become the loop's current one.

    Each batch is read, and its samples are being summed, before the program gets the
    one before it: so the sum is there when it is needed.
    """
    ahead: list[tuple[list[_Piece], Callable[[], int]]] = []
    for pieces in _global_batches(in_flight, read):
        ahead.append((pieces, how.sum_of(sum(len(each.slots) for each in pieces))))
        if len(ahead) > 1:
            is_over = yield from _delivered(loop, *ahead.pop(0), how)
            if is_over:
                return
    for pieces, wait in ahead:
        yield from _delivered(loop, pieces, wait, how)


class _Piece(NamedTuple):
    micro: MicroBatch
    slots: list[int]
    batch: Any


def _global_batches(
    in_flight: deque[MicroBatch], read: Iterator[Read]
) -> Iterator[list[_Piece]]:
    """Yield the micro-batches of each global batch, with what was read of them."""
    pieces: list[_Piece] = []
    is_over = False
    while not is_over:
        found = next(read, None)
        is_over = found is None
        while in_flight and (found or is_over):
            micro = in_flight.popleft()
            slots: list[int] = []
            batch = None
            if micro.indices is not NOTHING:
                assert found is not None
                (slots, batch), found = found, None
            pieces.append(_Piece(micro, slots, batch))
            if micro.part.is_step:
                yield pieces
                pieces = []


def _delivered(
    loop: RunningLoop, pieces: list[_Piece], wait: Callable[[], int], how: Settling
) -> Any:
    """Yield the micro-batches of a global batch; return whether the loop is over."""
    size, slots = wait(), pieces[0].micro.part
    number = pieces[0].micro.number
    if size == 0 and number == loop.first:
        raise ElasticRunError(
            "no stream has a sample, so no loop over them can deliver anything. Look "
            "at the paths that were given."
        )
    if size == 0 or (how.drop_last and size < slots.global_batch_size):
        return True
    if not how.shares.is_padded:
        pieces = [each for each in pieces if each.slots]
    shares = shares_of(
        [each.slots for each in pieces], size, slots.advance, how.shares.world_size
    )
    if not pieces:
        loop.current = MicroBatch(number, NOTHING, shares[0].part)
        yield NOTHING
    for piece, share in zip(pieces, shares, strict=False):
        micro, own = piece.micro, piece.slots
        loop.current = MicroBatch(
            number,
            [micro.indices[slot] for slot in own],
            share.part,
            [micro.places[slot] for slot in own],
        )
        yield piece.batch if own else how.padding()
    return False
