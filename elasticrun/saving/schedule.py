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
        self._is_each_epoch = every.is_each_epoch
        self._num_batches = every.num_batches or math.inf
        self._is_at_each = interval == 0
        self.due_at = 0 if self._is_at_each else self._num_batches
        self._by_time: AutoInterval | GrowingInterval
        if interval == "auto":
            self._by_time = AutoInterval()
        else:
            self._by_time = GrowingInterval(interval)

    @property
    def interval(self) -> float:
        """Seconds between checkpoints by time, as things stand; infinite for none."""
        return self._by_time.next_interval()

    def note_epoch(self, boundary: int) -> None:
        """Note that an epoch ends at this boundary."""
        if self._is_each_epoch:
            self.due_at = boundary
        elif self.due_at > 0:
            self.due_at += 1

    def note_saved(self, boundary: int, *, seconds: float) -> None:
        """Note that a save was made, or tried, at this boundary."""
        self._by_time.note_duration(seconds)
        if not self._is_at_each:
            self.due_at = boundary + self._num_batches

    def note_flight_ended(self, seconds: float) -> None:
        """Note how long a save took that was in flight; in the thread that wrote it."""
        self._by_time.note_duration(seconds)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Learn how long training waits for the save in the block."""
        begun = time.perf_counter()
        yield
        self._by_time.note_cost(time.perf_counter() - begun)


FIRST_INTERVAL = 20.0  # Of a generation, while nobody knows what a save costs.
LARGEST_SHARE = 0.01  # Of a generation's time, for which training waits for saves.
LARGEST_SHARE_OF_WRITING = 0.1  # Of the time, for which an early save is written.
SECONDS_BETWEEN_FAILURES = 4 * 3600.0  # Of no job in particular.
_NUM_COSTS = 5  # The newest ones count; a state may grow.


class GrowingInterval:
    """Doubles from a short interval up to that of the settings, while saves are cheap.

    Else a job that dies in its first minutes would begin anew, and one that dies every
    few minutes would never come to its end. So each generation begins with it.

    Args:
        longest: That of the settings; infinite for no saves by time.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._next = FIRST_INTERVAL if longest < math.inf else math.inf
        self._cost = self._duration = 0.0

    def note_cost(self, seconds: float) -> None:
        """Learn how long training has waited for a save."""
        self._cost = seconds
        self._next *= 2

    def note_duration(self, seconds: float) -> None:
        """Learn how long the last save took until it was committed."""
        self._duration = seconds

    def next_interval(self) -> float:
        """Return the seconds until the next save is to begin."""
        dear = max(
            self._cost / LARGEST_SHARE, self._duration / LARGEST_SHARE_OF_WRITING
        )
        return min(self._longest, max(self._next, dear))


class AutoInterval:
    """Learns what the saves of a generation cost."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._costs: deque[float] = deque(maxlen=_NUM_COSTS)
        self._spent = 0.0
        self._duration = 0.0

    def note_cost(self, seconds: float) -> None:
        self._costs.append(seconds)
        self._spent += seconds

    def note_duration(self, seconds: float) -> None:
        self._duration = seconds

    def next_interval(self) -> float:
        if not self._costs:
            return FIRST_INTERVAL
        cost = sum(self._costs) / len(self._costs)
        # What loses the least time, as Young and Daly have found.
        best = math.sqrt(2 * cost * SECONDS_BETWEEN_FAILURES)
        # What a generation's saves cost, with the next one, is within their share.
        least = (self._spent + cost) / LARGEST_SHARE - (self._clock() - self._begun)
        return max(best, least, cost, self._duration)
