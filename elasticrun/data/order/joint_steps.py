"""Cuts the batches of loaders that deliver in the same steps, all alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from elasticrun.data.order.batches import Batches
from elasticrun.data.order.shares import EvenShares, LoopShares, Shares

_RUNS_AHEAD = 100  # Of steps with one division, in which another one is looked for.


class Participant(NamedTuple):
    """One of the loaders.

    Attributes:
        batches: Its global batch k is delivered in step k.
    """

    batches: Batches
    shares: LoopShares


class JointSteps:
    """How the steps are cut that several loaders deliver in.

    All deliver equally many micro-batches in a step: as many as the one that needs most
    of them.
    """

    def __init__(
        self,
        members: Sequence[Participant],
        world_size: int,
        *,
        begin: int,
        end: int,
    ) -> None:
        self._members = members
        self._world_size = world_size
        self._known = begin  # Up to here all steps are divided alike.
        self._end = end
        self._unlike: int | None = None

    def num_micro(self, step: int) -> int:
        """Return into how many micro-batches a step is cut."""
        return max(member.shares.num_micro(step) for member in self._members)

    def num_alike(self, step: int) -> int:
        """Return how many steps are cut alike, this one the first; at least 1."""
        return min(member.shares.num_alike(step) for member in self._members)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return the samples of each loader in a step."""
        return tuple(member.batches.size(step) for member in self._members)

    def unlike_step(self, step: int) -> int | None:
        """Return a step whose batches do not divide alike, if one is in sight.

        Steps ahead of `step` are looked at, too, so that a program does not learn only
        at the last batch of its first epoch that its losses need weights of their own.
        """
        if self._unlike is None and step >= self._known:
            are_even = all(isinstance(own.shares, EvenShares) for own in self._members)
            for _ in range(_RUNS_AHEAD):
                if self._known >= self._end:
                    break
                sizes, num_micro = self.sizes(self._known), self.num_micro(self._known)
                are_alike = divide_alike(sizes, num_micro, self._world_size)
                if not (are_even and are_alike) and len(sizes) > 1:
                    self._unlike = self._known
                    break
                self._known += self.num_alike(self._known)
        return self._unlike


@lru_cache(maxsize=1024)
def divide_alike(sizes: tuple[int, ...], num_micro: int, world_size: int) -> bool:
    """Return whether each replica's micro-batches are the same share of all batches."""
    if 0 in sizes:  # Whose padding weighs nothing anywhere.
        return not any(sizes)
    if all(size % (world_size * num_micro) == 0 for size in sizes):
        return True
    first, *others = sizes
    for rank in range(world_size):
        whole = _lengths(first, rank, num_micro, world_size)
        for size in others:
            own = _lengths(size, rank, num_micro, world_size)
            if any(a * first != b * size for a, b in zip(own, whole, strict=True)):
                return False
    return True


def _lengths(size: int, rank: int, num_micro: int, world_size: int) -> list[int]:
    shares = Shares(rank, world_size, None, is_padded=True)
    return [len(run) for run in shares.cut(shares.even_share(size), num_micro)]
