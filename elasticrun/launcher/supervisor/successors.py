"""The replicas that wait for the next generation, forked and without an order."""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.launcher.forks.parked import Parked
from elasticrun.launcher.forks.starter import Starter


class Successors:
    """The replicas that were asked for last, there or on their way; none before.

    Args:
        on_ready: Called when all are there.
        on_first: Called when one is there.

    Attributes:
        is_asked: Whether they were asked for, and not taken since.
    """

    def __init__(
        self,
        starter: Starter,
        on_ready: Callable[[], None],
        *,
        on_first: Callable[[], None],
    ) -> None:
        self._starter = starter
        self._on_first = on_first
        self._on_ready = on_ready
        self._parked: list[Parked] = []
        self._num_asked = 0
        self.is_asked = False

    @property
    def is_ready(self) -> bool:
        """Whether all are there."""
        return bool(self._parked)

    @property
    def pids(self) -> set[int]:
        """Their process numbers."""
        return {each.pid for each in self._parked}

    def prepare(self, size: int) -> None:
        """Have so many wait, and none of those that did."""
        self.discard()
        self.is_asked = True
        number = self._num_asked

        def on_ready(parked: list[Parked]) -> None:
            if number == self._num_asked:
                self._parked = parked
                self._on_ready()
            else:
                discard(parked)

        def on_first() -> None:
            if number == self._num_asked:
                self._on_first()

        self._starter.park(size, on_ready, on_first=on_first)

    def take(self) -> list[Parked]:
        """Return them, to be let go."""
        taken, self._parked = self._parked, []
        self.is_asked = False
        return taken

    def discard(self) -> None:
        """Let them end, and those that are on their way."""
        self._num_asked += 1
        discard(self.take())


def discard(parked: list[Parked]) -> None:
    """Let replicas end that nobody needs."""
    for each in parked:
        each.discard()
