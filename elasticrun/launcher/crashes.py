"""What crashes a job has had, and whether it may go on after the next one."""

from __future__ import annotations

from elasticrun.launcher.nodes import Round
from elasticrun.launcher.outcomes import Outcome
from elasticrun.launcher.restarts import Budget

_CAUSES_KEPT = 10


class CrashBook:
    """Remembers what decides about a restart.

    Args:
        newest_at_start: The number of the newest checkpoint when the launcher started.

    Attributes:
        num_restarts: Restarts after crashes so far.
        causes: What they were, the last ones.
        has_trained: Whether a batch was trained on this node.
    """

    def __init__(self, max_restarts: int, *, newest_at_start: int) -> None:
        self.num_restarts = 0
        self.causes: list[str] = []
        self.has_trained = False
        self.budget = Budget(max_restarts)
        self._newest_at_start = newest_at_start
        self._has_job_trained = False

    def adopt(self, round_: Round) -> None:
        """Know what the other nodes know, so that all decide alike."""
        self._has_job_trained = self._has_job_trained or round_.has_trained
        self.budget.newest_at_crash = round_.newest_at_crash
        self.budget.num_used = round_.num_used

    def note(self, outcome: Outcome) -> None:
        """Learn from how a generation ended."""
        self._has_job_trained = self._has_job_trained or outcome.has_trained

    def decide(self, outcome: Outcome, generation: int) -> tuple[float | None, str]:
        """Take a crash.

        A node whose own replica fails before it has trained anything is at fault
        itself, and so is a program that nowhere has.

        Returns:
            Seconds to wait before the restart, or None if there is to be none; and
            what to say about that.
        """
        text = f"generation {generation}: {outcome.text}".partition("\n")[0]
        self.causes = [*self.causes, text][-_CAUSES_KEPT:]
        newest = outcome.newest
        has_trained = self.has_trained if outcome.is_here else self._has_job_trained
        if not has_trained and newest <= self._newest_at_start:
            return None, "this was before the first batch, so it is not tried again"
        delay = self.budget.on_crash(newest)
        most = self.budget.max_restarts
        if delay is None:
            return None, _describe_spent(most)
        self.num_restarts += 1
        return delay, (
            f"restart {self.budget.num_used} of {most}"
            + (f" in {delay:.0f} s" if delay else "")
            + (f" from checkpoint {newest}" if newest else " from the beginning")
        )


def _describe_spent(most: int) -> str:
    if most == 0:
        return "no restarts are allowed (--max-restarts 0)"
    if most == 1:
        return "1 restart without a newer checkpoint is used up (--max-restarts)"
    return f"{most} restarts without a newer checkpoint are used up (--max-restarts)"
