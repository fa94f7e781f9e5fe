"""`save_interval="auto"`: the interval that loses the least time to saves and failures.

With a save that costs C and failures M apart, saving every sqrt(2 C M) loses the least
(Young, Daly). C is measured: the time that training waits. M is estimated from the
failures that the job has seen. Training never waits more than a hundredth of the time,
and a save that is in flight meanwhile has ended before the next one begins.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from elasticrun.checkpoint.state import BaseState

# As if one failure had been seen in so many seconds before the job began.
PRIOR_SECONDS = 4 * 3600.0
FIRST_INTERVAL = 60.0  # While nobody knows what a save costs.
LARGEST_SHARE = 0.01
_NUM_COSTS = 5


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
