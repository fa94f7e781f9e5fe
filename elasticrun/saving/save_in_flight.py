"""A save that a thread writes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.states.state import BaseState

SaveOutcome = Checkpoint | str | BaseException


class SaveInFlight(threading.Thread):
    """A thread that writes one save, and ends with it.

    Not a thread for all saves: the interpreter waits at its end for threads that run,
    and dies if one that it does not wait for is in C++.

    Args:
        states: Those that were captured for it.
        write: Writes the checkpoint, and returns it, or why it could not be written. It
            is given what is set when it is to wait for other ranks no more.
        on_end: Called in the thread when there is an outcome, unless it was given up.
    """

    def __init__(
        self,
        number: int,
        states: Sequence[BaseState],
        write: Callable[[threading.Event], Checkpoint | str],
        *,
        on_end: Callable[[], object],
    ) -> None:
        super().__init__(name="elasticrun-writer", daemon=True)
        self.number = number
        self.states = states
        self.outcome: SaveOutcome | None = None
        self._write = write
        self._on_end = on_end
        self._given_up = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it came in time."""
        self.join(timeout)
        return not self.is_alive()

    def give_up(self) -> None:
        """Have it stop waiting for other ranks; `on_end` is not called any more."""
        self._given_up.set()

    def run(self) -> None:
        """Write; called by `start`, in this thread."""
        try:
            self.outcome = self._write(self._given_up)
        except BaseException as error:
            self.outcome = error
        if not self._given_up.is_set():
            self._on_end()
