"""The job's saves: at a boundary, on request, at the end; and what becomes of them."""

from __future__ import annotations

from elasticrun.checkpoint.place import Place
from elasticrun.control.gate import Gate
from elasticrun.control.watcher import Watcher
from elasticrun.position import Position, Progress
from elasticrun.saving import Saver
from elasticrun.schedule import Schedule

PATIENCE = 1800.0  # Seconds to wait for other ranks at a checkpoint nobody hurries.


class Saves:
    """Has the saver save, and whoever decides when learn of it.

    Args:
        saver: None without a checkpoint directory: nothing is saved then.

    Attributes:
        has_ended: Whether a save in flight has ended, and is to be settled.
    """

    def __init__(
        self,
        saver: Saver | None,
        schedule: Schedule,
        progress: Progress,
        gate: Gate,
        watcher: Watcher,
    ) -> None:
        self._saver = saver
        self._schedule = schedule
        self._progress = progress
        self._gate = gate
        self._watcher = watcher
        self._last: tuple[int, Position] | None = None
        self.has_ended = False
        if saver is not None:
            saver.on_end = self._note_end

    def save(
        self,
        *,
        timeout: float = PATIENCE,
        is_awaited: bool = True,
        may_end: bool = False,
    ) -> Place | None:
        """Save here. Collective.

        Args:
            timeout: Seconds to wait for other ranks.
            is_awaited: Whether to return only when the checkpoint is committed, not
                once all states are captured.
            may_end: Whether the job may end for good here, without a failure.

        Returns:
            Its directory; None if it is not awaited, could not be written, or there is
            no checkpoint directory.
        """
        if self._saver is None:
            return None
        position = self._progress.position
        with self._schedule.measured(), self._schedule.ending(may_end=may_end):
            checkpoint = self._saver.save(
                position.encode(), timeout=timeout, is_awaited=is_awaited
            )
        self._schedule.note_saved(self._gate.number, seconds=self._saver.seconds)
        self._watcher.note_saved(self._schedule.next_interval)
        self._last = (self._gate.number, position)
        return None if checkpoint is None else checkpoint.path

    def save_end(self) -> None:
        """Save the end of an epoch loop, unless its last boundary has just done so."""
        if self._last == (self._gate.number, self._progress.position):
            self.finish()
            if self._saver is None or not self._saver.has_failed:
                return
        self.save(may_end=True)

    def settle(self) -> None:
        """Take note of a save in flight that has ended.

        Raises:
            Exception: What it came to.
        """
        self.has_ended = False
        if self._saver is not None:
            self._saver.settle()

    def finish(self) -> None:
        """Wait until no save is in flight.

        Raises:
            Exception: What it came to.
        """
        if self._saver is not None:
            self._saver.finish(timeout=2 * PATIENCE)

    def close(self, *, timeout: float) -> None:
        """Wait for what is in flight, for `timeout` seconds at most.

        Raises:
            Exception: What it came to.
        """
        if self._saver is not None:
            self._saver.close(timeout=timeout)

    def _note_end(self) -> None:
        """Let the next boundary settle it: for the thread that has written it."""
        self.has_ended = True
        self._watcher.wake()
