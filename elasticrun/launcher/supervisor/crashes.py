"""Counts a job's crashes, and decides whether it restarts after the next one."""

from __future__ import annotations

from elasticrun.errors import counted
from elasticrun.launcher.nodes.nodes import RoundPlan
from elasticrun.launcher.verdict import Verdict

_CAUSES_KEPT = 10
_FREE = 3  # Restarts without a pause, after what is no failure of the program.
_LONGEST_DELAY = 60.0


class CrashHistory:
    """Remembers the crashes of a job, and decides whether it may restart.

    A checkpoint between two crashes lets it have all its restarts again.

    Args:
        newest_at_start: The number of the newest checkpoint when the launcher started.

    Attributes:
        num_restarts: Restarts after crashes so far.
        num_used: Those without a newer checkpoint between them.
        newest_at_crash: The newest checkpoint at the last crash.
        causes: What they were, the last ones.
        has_trained: Whether a batch was trained on this node.
    """

    def __init__(self, max_restarts: int, *, newest_at_start: int) -> None:
        self.num_restarts = self.num_used = self.newest_at_crash = 0
        self.causes: list[str] = []
        self.has_trained = False
        self.newest_at_start = newest_at_start
        self._max_restarts = max_restarts
        self._has_job_trained = False

    def adopt(self, round_: RoundPlan) -> None:
        """Take over what the other nodes know, so that all nodes decide the same."""
        self._has_job_trained = self._has_job_trained or round_.has_trained
        self.newest_at_crash = round_.newest_at_crash
        self.num_used = round_.num_used

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
        most = self._max_restarts
        if newest > self.newest_at_crash:
            self.num_used = 0
        self.newest_at_crash = newest
        if self.num_used >= most:
            return None, _describe_spent(most)
        self.num_used += 1
        self.num_restarts += 1
        is_free = verdict.is_from_outside and not verdict.is_out_of_memory
        delay = self.delay(num_free=_FREE if is_free else 1)
        return delay, (
            f"restart {self.num_used} of {most}"
            + (f" in {delay:.0f} s " if delay else " ")
            + start_from(newest)
        )

    def delay(self, *, num_free: int) -> float:
        """Return the seconds to wait: none at first, then each time twice as many."""
        if self.num_used <= num_free:
            return 0.0
        return min(_LONGEST_DELAY, 2.0 ** (self.num_used - num_free - 1))


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
