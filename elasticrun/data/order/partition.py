"""Cutting an order of positions into global, local and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

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
class Shares:
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

    def even_share(self, size: int) -> range:
        """Return this replica's run in a global batch of `size`, from its start."""
        return partition(range(size), self.rank, num_parts=self.world_size)

    @property
    def num_shares(self) -> int:
        """In how many shares a global batch is cut."""
        return self.num_virtual or self.world_size

    def cut(self, share: Sequence[int], num_micro: int) -> list[Sequence[int]]:
        """Cut this replica's share into its micro-batches.

        With padding there are equally many on every replica, and an empty one stands
        for a padding sample.
        """
        runs = [partition(share, m, num_parts=num_micro) for m in range(num_micro)]
        return runs if self.is_padded else [run for run in runs if run]
