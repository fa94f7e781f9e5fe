"""One run of a script: how it ended, and what it recorded."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticrun.check.runs.moments import Moment, MomentKey, moments_of
from elasticrun.check.runs.scenarios import RestartPlace, Scenario
from elasticrun.job.trace import read_trace
from elasticrun.launcher.endings import Ending
from elasticrun.launcher.supervisor.generation import Stack

# Moments that a run with restarts has as well; others are seen in a replay only.
_COMPARED = ("begin", "enter", "leave", "end")


@dataclass
class CheckedRun:
    """One run of a script, in one scenario.

    Attributes:
        folder: What the run left: `work`, `records`, `trace`, `logs`.
        failure: How the replica ended that failed first, or None.
        hang: Why the run was ended as hung; empty if it was not.
        output: The lines of the last generation, by rank.
        stacks: Where its replicas were when they hung, by rank.
        missed: The place that the program never came to, or None.
        last_leg: The number of the leg that was the last to run, from 0.
        seconds: What it took, from when its first replicas were forked.
    """

    scenario: Scenario
    folder: Path
    failure: Ending | None = None
    hang: str = ""
    output: dict[int, list[str]] = field(default_factory=dict)
    stacks: dict[int, Stack] = field(default_factory=dict)
    missed: RestartPlace | None = None
    last_leg: int = 0
    seconds: float = 0.0

    @property
    def has_finished(self) -> bool:
        return self.failure is None and not self.hang and self.missed is None

    @property
    def failing_scenario(self) -> Scenario:
        """The scenario up to its last restart, which shows it as well."""
        return self.scenario.until_leg(max(self.last_leg, 1))

    def leg_of(self, key: MomentKey | None) -> int:
        """Return in which leg after a restart a moment was, or else the last one."""
        there = self.compared.get(key) if key else None
        return max(1, self.last_leg if there is None else there.leg)

    @functools.cached_property
    def notes(self) -> list[dict[str, Any]]:
        """The records of all legs; only complete when these have ended."""
        return read_trace(self.folder / "records")

    @functools.cached_property
    def moments(self) -> list[Moment]:
        return moments_of(self.notes)

    @functools.cached_property
    def num_virtual(self) -> int | None:
        """Virtual replicas: with these, numbers of replicas have the same bits."""
        found = (note.get("virtual_replicas") for note in self.notes)
        return next((number for number in found if number), None)

    @functools.cached_property
    def boundaries(self) -> list[RestartPlace]:
        """The boundaries at which the program might have stopped, in their order."""
        return [
            RestartPlace(*note["place"])
            for note in self.notes
            if note["kind"] == "boundary" and not note["is_put_off"]
        ]

    @functools.cached_property
    def compared(self) -> dict[MomentKey, Moment]:
        """The moments that every run of the program has, each as it was last."""
        return {
            moment.key: moment
            for moment in self.moments
            if moment.key.kind in _COMPARED
            or (moment.key.kind == "exit" and moment.leg == self.last_leg)
        }

    @property
    def trace(self) -> Path:
        """Where the samples are."""
        return self.folder / "trace"
