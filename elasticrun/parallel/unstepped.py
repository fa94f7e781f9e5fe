"""Which gradients wait for an optimizer's step: those are in no checkpoint."""

from __future__ import annotations

from elasticrun.job.loop import Loop

_MANY = 2  # Times in a row that gradients were thrown away: it is meant so.


class Unstepped:
    """Whether gradients of a module wait for the step of one of its optimizers.

    A forward pass tells: one for training is followed by a backward pass, and its
    gradients wait until the optimizer steps. Those of one that comes after the step, in
    a turn of the loop whose step had a forward pass of its own, are taken to be thrown
    away: it was for the accuracy, or for the loss of another module. So are gradients
    that were zeroed in a later batch without a step, twice in a row; and what a loop
    without any step leaves, as it was for an evaluation. Outside of loops there are no
    boundaries.

    Attributes:
        loop: Where the last forward pass was that may wait; None if none does.
    """

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self._turn: object = None
        self._since = 0  # The batch of the first one.
        self._stepped_loop: object = None
        self._stepped_turn: object = None
        self._num_thrown_away = 0

    def note_forward(self, loop: Loop) -> None:
        """Note a forward pass for training, in a turn of a running loop."""
        turn = loop.current
        if turn is not self._stepped_turn:
            if self.loop is not loop:
                self.loop, self._since = loop, turn[0]
            self._turn = turn

    def note_zeroed(self, loop: Loop | None) -> None:
        """Note that the gradients are about to be zeroed, in a loop or (None) not."""
        if loop is not None and self.loop is loop and self._since != loop.current[0]:
            self._num_thrown_away += 1
            self.loop = None

    def note_step(self, loop: Loop | None, *, has_closure: bool = False) -> None:
        """Note that the optimizer is about to step, in a loop or (None) outside.

        Args:
            has_closure: Whether the forward pass is yet to come.
        """
        turn = None if loop is None else loop.current
        if has_closure or turn is self._turn:
            self._stepped_turn = turn
        self._stepped_loop = loop
        self.loop = None
        self._num_thrown_away = 0

    def is_pending(self, running_loop: Loop | None) -> bool:
        """Return whether a step is awaited, in the running loop or after it."""
        return (
            self.loop is not None
            and self._num_thrown_away < _MANY
            and (self.loop is running_loop or self.loop is self._stepped_loop)
        )
