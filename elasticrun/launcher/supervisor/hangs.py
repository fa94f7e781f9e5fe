"""When no news is bad news: how long a loop may go without a boundary, and whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticrun.launcher.options import AUTO
from elasticrun.launcher.supervisor.generation import Member

_SHORTEST = 540.0  # NCCL ends processes after 600, and says nothing of who hangs.
_TIMES_USUAL = 20.0


@dataclass
class HangClock:
    """Learns how long boundaries usually take.

    By itself ("auto") it looks at loops only, where boundaries must come: a program may
    do anything for any time outside of them. It doubles its patience after each hang,
    so that a job whose steps really take so long gets through.

    Args:
        setting: Seconds, which then count from the start; "auto"; None for never.
    """

    setting: float | str | None
    _longest: float = 0.0
    _shortest: float = _SHORTEST

    @property
    def timeout(self) -> float | None:
        """Seconds without a boundary that count as a hang, or None."""
        if self.setting == AUTO:
            return max(self._shortest, _TIMES_USUAL * self._longest)
        return None if self.setting is None else float(self.setting)

    def note_gap(self, seconds: float) -> None:
        """Learn from the time between two boundaries of a loop."""
        self._longest = max(self._longest, seconds)

    def note_hang(self) -> None:
        """Learn that this was too long, or that the patience was too short."""
        self._shortest *= 2

    def is_hung(self, silence: float, *, is_in_loop: bool) -> bool:
        """Return whether a replica hangs that has passed no boundary for so long."""
        timeout = self.timeout
        if timeout is None or (self.setting == AUTO and not is_in_loop):
            return False
        return silence > timeout


def held_up_by(silent: Sequence[Member]) -> Member | None:
    """Return the silent replica for which the others wait, None if none stands out.

    Where one hangs, the others soon wait for it: in a collective, a step further than
    it has come, or at a boundary that it has not reached.
    """
    behind = min(map(_progress, silent))
    last = [member for member in silent if _progress(member) == behind]
    return last[0] if len(last) < len(silent) or len(silent) == 1 else None


def _progress(member: Member) -> tuple[list[int], int]:
    report = member.report
    return list(report.get("counts", ())), report.get("num_steps", 0)
