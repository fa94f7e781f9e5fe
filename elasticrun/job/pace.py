"""How long this replica works by itself in a step, apart from waiting for others."""

from __future__ import annotations

from time import perf_counter


class Pace:
    """Adds up the time from an optimizer's step to the end of the next forward pass.

    In between, a replica reads a batch and computes; the backward pass, in which it
    waits for the others, is left out. What a GPU does meanwhile is not seen.

    Attributes:
        seconds: The sum.
        num_steps: Of how many steps.
    """

    __slots__ = ("_loop", "_since", "num_steps", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self._since = 0.0
        self._loop: object = None

    def begin(self, loop: object) -> None:
        """Note that an optimizer steps in `loop`: nobody is waited for."""
        self._loop = loop
        self._since = perf_counter()

    def end(self, loop: object) -> None:
        """Note that a forward pass has ended; counts once, and in the same loop."""
        if self._loop is loop:
            self.seconds += perf_counter() - self._since
            self.num_steps += 1
            self._loop = None
