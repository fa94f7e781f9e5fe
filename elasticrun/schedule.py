"""When the job saves by itself: after some time or batches, at the ends of epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elasticrun.auto_interval import AutoInterval
from elasticrun.env import Environment


class Schedule:
    """One replica's view of when to save; the same on all, but for the time.

    Attributes:
        due_at: The boundary at which the next checkpoint is due, whatever the time.
            Boundaries have the same numbers on all replicas, so that none need ask.
        auto: What learns the interval if that is "auto", a state of the job.
    """

    def __init__(
        self, environment: Environment, *, generation: int, is_saving: bool
    ) -> None:
        interval = environment.save_interval if is_saving else math.inf
        self._interval = interval
        self._is_each_epoch = is_saving and environment.save_every.is_each_epoch
        self._num_batches: float = math.inf
        if is_saving:
            self._num_batches = environment.save_every.num_batches or math.inf
        self.due_at = self._num_batches
        if interval == 0:
            self.due_at = 0
        self.auto = AutoInterval(generation) if interval == "auto" else None

    @property
    def interval(self) -> float:
        """Seconds between checkpoints by time, as things stand; infinite for none."""
        if self.auto is not None:
            return self.auto.next_interval()
        assert self._interval != "auto"
        return self._interval

    @property
    def next_interval(self) -> float | None:
        """Seconds until the next checkpoint by time; None if that does not change."""
        return None if self.auto is None else self.auto.next_interval()

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
    def measured(self) -> Iterator[None]:
        """Learn how long training waits for the save in the block."""
        begun = time.perf_counter()
        yield
        if self.auto is not None:
            self.auto.note_cost(time.perf_counter() - begun)

    @contextmanager
    def ending(self, *, may_end: bool) -> Iterator[None]:
        """Let the save in the block say whether nothing failed if it is the last."""
        if self.auto is None:
            yield
            return
        self.auto.is_ending = may_end
        try:
            yield
        finally:
            self.auto.is_ending = False
