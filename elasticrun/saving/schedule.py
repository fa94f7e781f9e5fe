"""When the job saves by itself: after some time or batches, at the ends of epochs."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from elasticrun.checkpoint.states.state import BaseState
from elasticrun.saving.settings import ONLY_BY_TIME, Settings


class Schedule:
    """One replica's view of when to save; the same on all, but for the time.

    Attributes:
        due_at: The boundary at which the next checkpoint is due, whatever the time.
            Boundaries have the same numbers on all replicas, so that none need ask.
        auto: What learns the interval if that is "auto", a state of the job.
    """

    def __init__(self, settings: Settings, *, generation: int, is_saving: bool) -> None:
        interval = settings.save_interval if is_saving else math.inf
        every = settings.save_every if is_saving else ONLY_BY_TIME
        self._interval = interval
        self._is_each_epoch = every.is_each_epoch
        self._num_batches = every.num_batches or math.inf
        self.due_at = 0 if interval == 0 else self._num_batches
        self.auto = AutoInterval(generation) if interval == "auto" else None

    @property
    def interval(self) -> float:
        """Seconds between checkpoints by time, as things stand; infinite for none."""
        if self.auto is not None:
            return self.auto.next_interval()
        assert self._interval != "auto"
        return self._interval

    def note_epoch(self, boundary: int) -> None:
        """An epoch ends at this boundary, which is not one of a batch."""
        if self._is_each_epoch:
            self.due_at = boundary
        elif self.due_at > 0:
            self.due_at += 1

    def note_saved(self, boundary: int, *, seconds: float) -> None:
        """This boundary was saved, or could not be.

        Args:
            seconds: How long the last save took that has ended.
        """
        if self.auto is not None:
            self.auto.note_duration(seconds)
        if self._interval != 0:
            self.due_at = boundary + self._num_batches

    @contextmanager
    def saving(self, *, may_end: bool) -> Iterator[None]:
        """Learn how long training waits for the save in the block.

        Args:
            may_end: Whether to mark its checkpoint as one that a generation may end
                with: if the next one resumes from another, this one has failed.
        """
        if self.auto is None:
            yield
            return
        self.auto.is_ending = may_end
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.auto.is_ending = False
        self.auto.note_cost(time.perf_counter() - begun)


# As if one failure had been seen in so many seconds before the job began.
PRIOR_SECONDS = 4 * 3600.0
FIRST_INTERVAL = 60.0  # While nobody knows what a save costs.
LARGEST_SHARE = 0.01  # Of a generation's time, for which training waits for saves.
_NUM_COSTS = 5  # The newest ones count; a state may grow.


def best_interval(cost: float, seconds_between_failures: float) -> float:
    """Return the seconds between saves that lose the least time."""
    return math.sqrt(2 * cost * seconds_between_failures)


class AutoInterval(BaseState):
    """Learns what saves cost and how often the job fails, over all its generations.

    A generation has failed if the next one resumes from a checkpoint that was not
    written at a stop or at the end.

    Args:
        generation: The number of the running one.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self, generation: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("save-interval")
        self._generation = generation
        self._clock = clock
        self._begun = clock()
        self._seconds_before = 0.0
        self._num_failures = 0
        self._costs: deque[float] = deque(maxlen=_NUM_COSTS)
        self._spent = 0.0
        self._duration = 0.0
        self.is_ending = False

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
        # What a generation's saves cost, with the next one, is within their share.
        least = (self._spent + cost) / LARGEST_SHARE - (self._clock() - self._begun)
        best = best_interval(cost, self.seconds_between_failures)
        return max(best, least, cost, self._duration)

    @property
    def seconds_between_failures(self) -> float:
        """What is to be expected, from what was seen."""
        return (self._seconds + PRIOR_SECONDS) / (self._num_failures + 1)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + self._clock() - self._begun

    def save(self, fileobj: BinaryIO) -> None:
        """Write what was learned, and whether the job ends with this checkpoint."""
        values = {
            "generation": self._generation,
            "seconds": self._seconds,
            "failures": self._num_failures,
            "costs": list(self._costs),
            "duration": self._duration,
            "is_ending": self.is_ending,
        }
        fileobj.write(json.dumps(values).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Go on from what earlier generations learned; count those that failed."""
        values = json.loads(fileobj.read())
        self._seconds_before = values["seconds"]
        self._costs.extend(values["costs"])
        self._duration = values.get("duration", 0.0)
        self._num_failures = values["failures"]
        if not values["is_ending"]:
            self._num_failures += self._generation - values["generation"]
