"""Decides when to save: after a time, a number of batches, or an epoch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticrun.saving.settings import ONLY_BY_TIME, Settings


class Schedule:
    """One replica's view of when to save; the same on all, but for the time.

    Attributes:
        due_at: The boundary at which the next checkpoint is due, whatever the time.
            Boundaries have the same numbers on all replicas, so that none need ask.
    """

    def __init__(self, settings: Settings, *, is_saving: bool) -> None:
        interval = settings.save_interval if is_saving else math.inf
        every = settings.save_every if is_saving else ONLY_BY_TIME
        self._interval = interval
        self._is_each_epoch = every.is_each_epoch
        self._num_batches = every.num_batches or math.inf
        self.due_at = 0 if interval == 0 else self._num_batches
        self._auto = AutoInterval() if interval == "auto" else None

    @property
    def interval(self) -> float:
        """Seconds between checkpoints by time, as things stand; infinite for none."""
        if self._auto is not None:
            return self._auto.next_interval()
        assert self._interval != "auto"
        return self._interval

    def note_epoch(self, boundary: int) -> None:
        """Note that an epoch ends at this boundary."""
        if self._is_each_epoch:
            self.due_at = boundary
        elif self.due_at > 0:
            self.due_at += 1

    def note_saved(self, boundary: int, *, seconds: float) -> None:
        """Note that a save was made, or tried, at this boundary.

        Args:
            seconds: How long the last save took that has ended.
        """
        if self._auto is not None:
            self._auto.note_duration(seconds)
        if self._interval != 0:
            self.due_at = boundary + self._num_batches

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Learn how long training waits for the save in the block."""
        begun = time.perf_counter()
        yield
        if self._auto is not None:
            self._auto.note_cost(time.perf_counter() - begun)


SECONDS_BETWEEN_FAILURES = 4 * 3600.0  # Of no job in particular.
FIRST_INTERVAL = 60.0  # While nobody knows what a save costs.
LARGEST_SHARE = 0.01  # Of a generation's time, for which training waits for saves.
_NUM_COSTS = 5  # The newest ones count; a state may grow.


class AutoInterval:
    """Learns what the saves of a generation cost.

    Args:
        clock: Returns seconds that never go back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._costs: deque[float] = deque(maxlen=_NUM_COSTS)
        self._spent = 0.0
        self._duration = 0.0

    def note_cost(self, seconds: float) -> None:
        """Learn how long training has waited for a save."""
        self._costs.append(seconds)
        self._spent += seconds

    def note_duration(self, seconds: float) -> None:
        """Learn how long the last save took until it was committed."""
        self._duration = seconds

    def next_interval(self) -> float:
        """Return the seconds until the next save is to begin."""
        if not self._costs:
            return FIRST_INTERVAL
        cost = sum(self._costs) / len(self._costs)
        # What loses the least time, as Young and Daly have found.
        best = math.sqrt(2 * cost * SECONDS_BETWEEN_FAILURES)
        # What a generation's saves cost, with the next one, is within their share.
        least = (self._spent + cost) / LARGEST_SHARE - (self._clock() - self._begun)
        return max(best, least, cost, self._duration)
