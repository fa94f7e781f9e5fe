"""Batches of which the replicas tell each other what samples there are."""

from __future__ import annotations

from collections import Counter, deque
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
    counted = (
        (pieces, [sum(len(each.slots) for each in pieces)])
        for pieces in _global_batches(in_flight, read)
    )
    for pieces, [size] in _summed(counted, how):
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


def full_batches(
    loop: RunningLoop,
    in_flight: deque[MicroBatch],
    read: Iterator[Read],
    how: Delivery,
    *,
    at: int,
    collate: Callable[[list[Any]], Any],
) -> Iterator[Any]:
    """Yield full batches alone: each has the samples of the next slots with one.

    So where lanes have run dry a batch reaches over more slots than it has samples, and
    its number is that of its first slot over its size. What is left at the end and
    makes no full batch is left out.

    Args:
        read: Gives samples that are not collated.
        at: The slot with which to begin.
    """
    size, begin = loop.batches.size(loop.begin), at
    # Of each sample that is to be delivered: its slot, whose it is, and what was read.
    waiting: deque[tuple[int, int, Any]] = deque()
    num_empty = 0
    for pieces, owners in _summed(
        _owned(_global_batches(in_flight, read), size, how.shares.rank), how
    ):
        start = loop.batches.start(pieces[0].micro.number)
        own = {
            piece.micro.places[slot]: (piece.micro.indices[slot], sample)
            for piece in pieces
            for slot, sample in zip(piece.slots, piece.batch or (), strict=True)
        }
        waiting.extend(
            (start + place, owner - 1, own.get(place))
            for place, owner in enumerate(owners)
            if owner and start + place >= begin
        )
        while len(waiting) >= size:
            taken = [waiting.popleft() for _ in range(size)]
            end = taken[-1][0] + 1
            yield from _delivered_full(loop, taken, at, end - at, how, collate)
            at = end
        num_empty = 0 if any(owners) else num_empty + size
        if num_empty >= how.num_lanes:
            break
    if at == loop.batches.start(loop.first):
        raise ElasticRunError(
            f"the streams have {len(waiting)} samples, which make no full batch of "
            f"{size}, so with drop_last=True a loop over them delivers nothing. Take "
            "smaller batches, or leave drop_last out."
        )


def _owned(
    batches: Iterator[list[_Piece]], size: int, rank: int
) -> Iterator[tuple[list[_Piece], list[int]]]:
    """Yield the pieces of batches, and whose sample is in each slot, from 1 on."""
    for pieces in batches:
        owners = [0] * size
        for piece in pieces:
            for slot in piece.slots:
                owners[piece.micro.places[slot]] = rank + 1
        yield pieces, owners


def _delivered_full(
    loop: RunningLoop,
    taken: list[tuple[int, int, Any]],
    at: int,
    advance: int,
    how: Delivery,
    collate: Callable[[list[Any]], Any],
) -> Iterator[Any]:
    """Yield this replica's micro-batches of the samples of a global batch."""
    size, rank = len(taken), how.shares.rank
    [(_, largest)] = Counter(owner for _, owner, _ in taken).most_common(1)
    own = [place for place, (_, owner, _) in enumerate(taken) if owner == rank]
    runs = how.shares.cut(own, how.shares.num_micro(largest))
    for run, share in zip(
        runs or [()],
        micro_batches_of(runs, size, advance, how.shares.world_size, padding=()),
        strict=True,
    ):
        found = [taken[place][2] for place in run]
        loop.num_passed = at % size
        loop.current = MicroBatch(
            at // size, [index for index, _ in found], share.part, run
        )
        if found:
            yield collate([sample for _, sample in found])
        else:
            yield how.padding() if runs else NOTHING


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
    batches: Iterator[tuple[list[_Piece], list[int]]], how: Delivery
) -> Iterator[tuple[list[_Piece], list[int]]]:
    """Yield the batches, and for each the sums of its numbers over all replicas.

    Each is read, and its sums begin, before the program gets the one before it.
    """
    before = None
    for pieces, numbers in batches:
        after = pieces, how.sums_of(numbers)
        if before is not None:
            yield before[0], before[1]()
        before = after
    if before is not None:
        yield before[0], before[1]()


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
