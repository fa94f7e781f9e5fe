"""One run of a script: how it ended, what it recorded, and what it replayed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from elasticrun.check.scenarios import RestartPlace, Scenario
from elasticrun.job.trace import read_trace
from elasticrun.launcher.endings import Ending
from elasticrun.launcher.supervisor.generation import Stack

# Where a run with restarts takes snapshots as well; other points are in a replay only.
_COMPARED = ("begin", "enter", "leave", "end")
_RESUMING = ("continue", "enter", "begin", "exit")
_WORDS = {
    "begin": "the start of epoch {epoch}",
    "enter": "the start of loop {loop} of epoch {epoch}",
    "leave": "the end of loop {loop} of epoch {epoch}",
    "end": "the end of epoch {epoch}",
    "exit": "the end of the program",
}


class SnapshotKey(NamedTuple):
    """The point of a program at which each run takes a snapshot."""

    kind: str
    epoch: int = -1
    loop: int = -1
    in_epoch: bool = True

    def describe(self) -> str:
        text = _WORDS[self.kind].format(epoch=self.epoch, loop=self.loop)
        return text if self.in_epoch else text.replace("of epoch", "after epochs up to")


class Snapshot(NamedTuple):
    """All recorded values at one point of the program.

    Attributes:
        fields: Every field of the registered states.
        files: The files that differ from the start of the run; None for gone ones.
    """

    key: SnapshotKey
    generation: int
    fields: dict[str, Any]
    random: dict[str, Any]
    files: dict[str, Any]
    variables: dict[str, Any]
    states: list[str]
    num_batches: int = 0


class LineChange(NamedTuple):
    """A line that changed a field."""

    field: str
    zone: str
    path: str
    line: int
    generation: int


def snapshots_of(notes: Iterable[dict[str, Any]]) -> list[Snapshot]:
    """Return the snapshots among what was noted."""
    return [
        Snapshot(
            SnapshotKey(
                **{name: note[name] for name in SnapshotKey._fields if name in note}
            ),
            **{name: note[name] for name in Snapshot._fields[1:] if name in note},
        )
        for note in notes
        if "fields" in note
    ]


class Replay(NamedTuple):
    """What was run again between a stop and the place where the program went on.

    Attributes:
        stopped: What everything was at when the job stopped.
        steps: The snapshots of the replay, each with the zone that led to it; the last
            one is where the program went on.
    """

    stopped: Snapshot
    steps: list[tuple[str, Snapshot]]

    @property
    def resumed(self) -> Snapshot:
        """What everything was at when the program went on."""
        return self.steps[-1][1]


def replays_of(snapshots: list[Snapshot]) -> list[Replay]:
    """Return the replays of a run, one after each of its restarts."""
    found = []
    for stopped in (snapshot for snapshot in snapshots if snapshot.key.kind == "stop"):
        after = [
            snapshot
            for snapshot in snapshots
            if snapshot.generation == stopped.generation + 1
        ]
        steps: list[tuple[str, Snapshot]] = []
        has_epoch = False
        previous = ""
        for snapshot in after:
            steps.append((_zone_before(snapshot.key, previous, has_epoch), snapshot))
            has_epoch = has_epoch or snapshot.key.kind in ("begin", "rebegin")
            previous = snapshot.key.kind
            if snapshot.key.kind in _RESUMING:
                break
        if steps:
            found.append(Replay(stopped, steps))
    return found


def _zone_before(key: SnapshotKey, previous: str, has_epoch: bool) -> str:
    """Return the zone whose code ran just before a snapshot."""
    if key.kind in ("start", "begin", "rebegin", "exit") or not key.in_epoch:
        return "D" if has_epoch else "P"
    return "A" if previous in ("begin", "rebegin") else "B"


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
        last_generation: The number of the generation that was the last to run, from 0.
        seconds: What it took, from when its first replicas were forked.
    """

    scenario: Scenario
    folder: Path
    failure: Ending | None = None
    hang: str = ""
    output: dict[int, list[str]] = field(default_factory=dict)
    stacks: dict[int, Stack] = field(default_factory=dict)
    missed: RestartPlace | None = None
    last_generation: int = 0
    seconds: float = 0.0

    @property
    def has_finished(self) -> bool:
        return self.failure is None and not self.hang and self.missed is None

    @property
    def failing_scenario(self) -> Scenario:
        """The scenario up to its last restart, which shows it as well."""
        return self.scenario.until_generation(max(self.last_generation, 1))

    def generation_of(self, key: SnapshotKey | None) -> int:
        """Return which restarted generation took a snapshot, or else the last one."""
        there = self.compared.get(key) if key else None
        return max(1, self.last_generation if there is None else there.generation)

    @functools.cached_property
    def notes(self) -> list[dict[str, Any]]:
        """The records of all generations; only complete when these have ended."""
        return read_trace(self.folder / "records")

    @functools.cached_property
    def snapshots(self) -> list[Snapshot]:
        return snapshots_of(self.notes)

    @property
    def line_changes(self) -> list[LineChange]:
        return [
            LineChange(*(note[name] for name in LineChange._fields))
            for note in self.notes
            if note["kind"] == "line"
        ]

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
    def compared(self) -> dict[SnapshotKey, Snapshot]:
        """The snapshots that every run of the program takes, each as it was last."""
        return {
            snapshot.key: snapshot
            for snapshot in self.snapshots
            if snapshot.key.kind in _COMPARED
            or (
                snapshot.key.kind == "exit"
                and snapshot.generation == self.last_generation
            )
        }

    @property
    def trace(self) -> Path:
        """Where the samples are."""
        return self.folder / "trace"
