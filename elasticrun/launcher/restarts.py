"""How often a job may crash, and how long it waits before it starts again."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_DELAY = 60.0


@dataclass
class Budget:
    """Counts crashes; a checkpoint newer than the last crash makes it full again.

    Attributes:
        max_restarts: Restarts after crashes without a newer checkpoint between them.
        num_used: How many of them are used.
        newest_at_crash: The newest checkpoint at the last crash.
    """

    max_restarts: int
    num_used: int = 0
    newest_at_crash: int = 0

    def on_crash(self, newest: int) -> float | None:
        """Count a crash.

        Args:
            newest: The number of the newest checkpoint, 0 without any.

        Returns:
            Seconds to wait before the restart, or None if the budget is spent. The
            first restart comes at once, each further one after twice the time.
        """
        if newest > self.newest_at_crash:
            self.num_used = 0
        self.newest_at_crash = newest
        if self.num_used >= self.max_restarts:
            return None
        self.num_used += 1
        if self.num_used == 1:
            return 0.0
        return min(_LONGEST_DELAY, 2.0 ** (self.num_used - 2))
