"""Saves and stops that wait while gradients accumulate, which are in no checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elasticrun.control.agreement import STOP
from elasticrun.control.gate import Decision

logger = logging.getLogger(__name__)

_MOST_BOUNDARIES = 64  # Most programs accumulate over fewer batches.


class Unstepped:
    """Whether gradients wait for an optimizer's step, which are in no checkpoint.

    A forward pass tells: one for training is followed by a backward pass. The gradients
    of one that comes after the step, in a turn of the loop whose step had a forward
    pass of its own, are taken to be thrown away: it was for the accuracy, or for the
    loss of another module. What a loop without any step leaves is taken so, too: it was
    for an evaluation. Outside of loops there are no boundaries.
    """

    def __init__(self) -> None:
        self._loop: object = None  # Where the last forward pass was that may wait.
        self._turn: object = None
        self._stepped_loop: object = None
        self._stepped_turn: object = None

    def note_forward(self, loop: object, turn: object) -> None:
        """Note a forward pass for training, in one turn of a running loop."""
        if turn is not self._stepped_turn:
            self._loop, self._turn = loop, turn

    def note_step(self, loop: object, turn: object, *, has_closure: bool) -> None:
        """Note that an optimizer is about to step, in a loop or (None) outside.

        Args:
            has_closure: Whether the forward pass is yet to come.
        """
        if has_closure or turn is self._turn:
            self._stepped_turn = turn
        self._stepped_loop = loop
        self._loop = None

    def is_pending(self, running_loop: object) -> bool:
        """Return whether a step is awaited, in the running loop or after it."""
        loop = self._loop
        return loop is not None and (loop is running_loop or loop is self._stepped_loop)


class Postponement:
    """What is put off from one boundary to the next, alike on all replicas.

    Attributes:
        decision: What the replicas have agreed on and not done yet, or None.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self._reasons: list[Callable[[], bool]] = []
        self._num_boundaries = 0

    def add(self, reason: Callable[[], bool]) -> None:
        """Put off while `reason()` holds, which it does on all replicas or on none."""
        self._reasons.append(reason)

    def take(self, decision: Decision | None) -> tuple[bool, Decision | None]:
        """Return whether to act at this boundary, and on what.

        A reason that does not pass is ignored after some boundaries.

        Args:
            decision: What is agreed on for this boundary; None for a save that is due.
        """
        if self.decision is not None and (decision is None or decision.kind != STOP):
            decision = self.decision
        if any(reason() for reason in self._reasons):
            if self._num_boundaries < _MOST_BOUNDARIES:
                self._num_boundaries += 1
                self.decision = decision
                return False, None
            logger.warning(
                "for %d boundaries no optimizer has stepped with the gradients that "
                "were computed; they are in no checkpoint, so a restart would lose "
                "them. Accumulate with a larger batch_size and max_local_batch_size.",
                self._num_boundaries,
            )
        self._num_boundaries, self.decision = 0, None
        return True, decision
