"""Which gradients wait for an optimizer's step: those are in no checkpoint."""

from __future__ import annotations

from torch.optim import Optimizer

from elasticrun.job.loop import Turns

_MANY = 2  # Times in a row that gradients were thrown away: it is meant so.


class Unstepped:
    """Whether gradients of a module wait for the step of one of its optimizers.

    A forward pass tells: one for training is followed by a backward pass, and its
    gradients wait for each optimizer until that steps. Those of one that comes after
    the step, in a turn of the loop whose step had a forward pass of its own, are taken
    to be thrown away: it was for the accuracy, or for the loss of another module. So
    are those of an optimizer that had its gradients zeroed in a later batch without
    having stepped, twice in a row; and what a loop without any step leaves, as it was
    for an evaluation. Outside of loops there are no boundaries.
    """

    def __init__(self) -> None:
        self._waits: dict[Optimizer, _Pending] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Expect steps of an optimizer."""
        self._waits[optimizer] = _Pending()

    def note_forward(self, loop: Turns) -> None:
        """Note a forward pass for training, in a turn of a running loop."""
        turn = loop.current
        for wait in self._waits.values():
            if turn is not wait.stepped_turn:
                if wait.loop is not loop:
                    wait.loop, wait.since = loop, turn[0]
                wait.turn = turn

    def note_zeroed(self, optimizer: Optimizer, loop: Turns | None) -> None:
        """Note that an optimizer's gradients are about to be zeroed."""
        wait = self._waits[optimizer]
        if loop is not None and wait.loop is loop and wait.since != loop.current[0]:
            wait.num_thrown_away += 1
            wait.loop = None

    def note_all_zeroed(self, loop: Turns | None) -> None:
        """Note that the gradients of all optimizers are about to be zeroed."""
        for optimizer in self._waits:
            self.note_zeroed(optimizer, loop)

    def note_step(
        self, optimizer: Optimizer, loop: Turns | None, *, has_closure: bool
    ) -> None:
        """Note that an optimizer is about to step, in a loop or (None) outside.

        Args:
            has_closure: Whether the forward pass is yet to come.
        """
        wait = self._waits[optimizer]
        turn = None if loop is None else loop.current
        if has_closure or turn is wait.turn:
            wait.stepped_turn = turn
        wait.stepped_loop = loop
        wait.loop = None
        wait.num_thrown_away = 0

    def is_pending(self, running_loop: Turns | None) -> bool:
        """Return whether a step is awaited, in the running loop or after it."""
        return any(
            wait.loop is not None
            and wait.num_thrown_away < _MANY
            and (wait.loop is running_loop or wait.loop is wait.stepped_loop)
            for wait in self._waits.values()
        )


class _Pending:
    """What one optimizer has to step with."""

    __slots__ = (
        "loop",
        "num_thrown_away",
        "since",
        "stepped_loop",
        "stepped_turn",
        "turn",
    )

    def __init__(self) -> None:
        self.loop: object = None  # Where the last forward pass was that may wait.
        self.turn: object = None
        self.since = 0  # The batch of the first one.
        self.stepped_loop: object = None
        self.stepped_turn: object = None
        self.num_thrown_away = 0
