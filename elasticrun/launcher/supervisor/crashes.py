"""Counts a job's crashes, and decides whether it restarts after the next one."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.errors import counted
from elasticrun.launcher.nodes.nodes import Round
from elasticrun.launcher.verdict import Verdict

_CAUSES_KEPT = 10
_FREE = 3  # Restarts without a pause, after what is no failure of the program.


class CrashBook:
    """Remembers the crashes of a job, and decides whether it may restart.

    Args:
        newest_at_start: The number of the newest checkpoint when the launcher started.

    Attributes:
        num_restarts: Restarts after crashes so far.
        causes: What they were, the last ones.
        has_trained: Whether a batch was trained on this node.
        newest_at_start: As the argument.
    """

    def __init__(self, max_restarts: int, *, newest_at_start: int) -> None:
        self.num_restarts = 0
        self.causes: list[str] = []
        self.has_trained = False
        self.budget = Budget(max_restarts)
        self.newest_at_start = newest_at_start
        self._has_job_trained = False

    def adopt(self, round_: Round) -> None:
        """Take over what the other nodes know, so that all nodes decide the same."""
        self._has_job_trained = self._has_job_trained or round_.has_trained
        self.budget.newest_at_crash = round_.newest_at_crash
        self.budget.num_used = round_.num_used

    def note(self, verdict: Verdict) -> None:
        """Learn from how a generation ended."""
        self._has_job_trained = self._has_job_trained or verdict.has_trained

    def decide(self, verdict: Verdict, generation: int) -> tuple[float | None, str]:
        """Count a crash, and decide whether a restart follows.

        A node whose own replica fails before it has trained anything is at fault
        itself, and so is a program that nowhere has; but not for a signal that somebody
        else has sent.

        Returns:
            Seconds to wait before the restart, or None if there is to be none; and
            what to say about that.
        """
        text = f"generation {generation}: {verdict.text}".partition("\n")[0]
        self.causes = [*self.causes, text][-_CAUSES_KEPT:]
        newest = verdict.newest
        has_trained = self.has_trained if verdict.is_here else self._has_job_trained
        is_bug = not (has_trained or verdict.is_from_outside)
        if is_bug and newest <= self.newest_at_start:
            return None, "this was before the first batch, so it is not tried again"
        is_free = verdict.is_from_outside and not verdict.is_out_of_memory
        delay = self.budget.on_crash(newest, num_free=_FREE if is_free else 1)
        most = self.budget.max_restarts
        if delay is None:
            return None, _describe_spent(most)
        self.num_restarts += 1
        return delay, (
            f"restart {self.budget.num_used} of {most}"
            + (f" in {delay:.0f} s " if delay else " ")
            + start_from(newest)
        )


def start_from(newest: int) -> str:
    """Return where a restart begins, for people."""
    return f"from checkpoint {newest}" if newest else "from the beginning"


def _describe_spent(most: int) -> str:
    if most == 0:
        return "no restarts are allowed (--max-restarts 0)"
    return (
        "no restarts are left (--max-restarts): the last new checkpoint is "
        f"{counted(most, 'restart')} ago"
    )


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

    def on_crash(self, newest: int, *, num_free: int = 1) -> float | None:
        """Count a crash.

        Args:
            newest: The number of the newest checkpoint, 0 without any.
            num_free: How many restarts come at once; each further one comes after twice
                the time.

        Returns:
            Seconds to wait before the restart, or None if the budget is spent.
        """
        if newest > self.newest_at_crash:
            self.num_used = 0
        self.newest_at_crash = newest
        if self.num_used >= self.max_restarts:
            return None
        self.num_used += 1
        if self.num_used <= num_free:
            return 0.0
        return min(_LONGEST_DELAY, 2.0 ** (self.num_used - num_free - 1))
