"""Cutting an order of positions into global, local and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


def partition(index: int, batch_size: int, *, rank: int, world_size: int) -> range:
    """Return the positions in the order that `rank` takes of one global batch.

    The batch is cut into `world_size` runs whose lengths differ by at most one, the
    longer ones first, so that every replica's share depends on nothing but these four
    numbers.

    Args:
        index: Samples consumed before this batch, in [0, num_samples].
        batch_size: Samples in this global batch; fewer than usual in the last one.
        rank: Which replica, in [0, world_size).
        world_size: How many replicas share the batch.

    Returns:
        A possibly empty range within [index, index + batch_size).
    """
    return _run(range(index, index + batch_size), rank, num_runs=world_size)


def num_micro_batches(
    batch_size: int, *, world_size: int, max_local_batch_size: int | None
) -> int:
    """Return how many forward passes every replica makes for one global batch.

    The largest share decides for all, so that each replica enters the same number of
    collectives.

    Args:
        batch_size: Samples in this global batch; fewer than usual in the last one.
        world_size: How many replicas share the batch.
        max_local_batch_size: Samples that fit into one forward pass; None for any.

    Returns:
        At least 1.
    """
    if max_local_batch_size is None:
        return 1
    largest_share = _ceil_divide(batch_size, world_size)
    return max(1, _ceil_divide(largest_share, max_local_batch_size))


def micro_batch(share: range, number: int, *, num_micro: int) -> range:
    """Return the positions of one micro-batch of a replica's share.

    The share is cut into `num_micro` runs whose lengths differ by at most one, the
    longer ones first.

    Args:
        share: The replica's positions, as `partition` returns them.
        number: Which micro-batch, in [0, num_micro).
        num_micro: How many there are, as `num_micro_batches` returns it.

    Returns:
        A part of `share`, empty where there are fewer samples than micro-batches.
    """
    return _run(share, number, num_runs=num_micro)


@dataclass(frozen=True)
class Shares:
    """How every global batch of a loader is shared out; fixed for a generation.

    Attributes:
        is_padded: Whether a replica without samples gets padding (`even_batches`).
    """

    rank: int
    world_size: int
    max_local_batch_size: int | None
    is_padded: bool

    def num_micro(self, size: int) -> int:
        """Return into how many micro-batches a global batch of `size` is cut."""
        return num_micro_batches(
            size,
            world_size=self.world_size,
            max_local_batch_size=self.max_local_batch_size,
        )

    def micro_batches(self, size: int, num_micro: int) -> list[range]:
        """Return this replica's runs in a global batch of `size`, from its start.

        With padding there are equally many on every replica, and an empty one stands
        for a padding sample.
        """
        share = partition(0, size, rank=self.rank, world_size=self.world_size)
        runs = [micro_batch(share, m, num_micro=num_micro) for m in range(num_micro)]
        return runs if self.is_padded else [run for run in runs if run]


def _run(whole: range, number: int, *, num_runs: int) -> range:
    """Return one of the runs of nearly equal length, the longer ones first."""
    length, num_longer = divmod(len(whole), num_runs)
    start = number * length + min(number, num_longer)
    return whole[start : start + length + (number < num_longer)]


def _ceil_divide(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
