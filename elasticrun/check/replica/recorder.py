"""Records states, files and variables while the program runs, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrun.check.replica.fields import fields_of_generators, fields_of_state
from elasticrun.check.replica.file_watch import FileWatch, changes, flush_opened_files
from elasticrun.check.replica.variables import plain_variables
from elasticrun.check.runs.plan import Plan
from elasticrun.check.runs.scenarios import RestartPlace
from elasticrun.checkpoint.files.durable import open_append
from elasticrun.checkpoint.states.metrics import MetricState, find_metrics
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.job.job import Job
from elasticrun.job.replay import Anchors

_BASE = "files-at-start.json"


class Recorder:
    """Records the states, files and variables of rank 0.

    Attributes:
        zone: The zone of the program that runs now: P, A, L, B (or C), D.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._records = Path(plan.records)
        self._root = str(Path(plan.directory).parent)
        self._files = FileWatch(Path(plan.directory))
        self.zone = "P"
        # A program may make a second job; its files are still those since the first.
        base = self._records / _BASE
        if plan.leg == 0 and not base.exists():
            self._records.mkdir(parents=True, exist_ok=True)
            base.write_text(json.dumps(self._files.look()))
        self._base = json.loads(base.read_text())
        # Read as a trace is: a leg is a generation, of which rank 0 notes.
        self._file = open_append(self._records / f"{plan.leg}-0.jsonl")

    def note(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, "leg": self._plan.leg, "zone": self.zone, **values}
        text = json.dumps(line)
        if kind != "line":  # A state may hold a path, and each run has its own folder.
            text = text.replace(self._root, "")
        self._file.write(f"{text}\n")

    def note_moment(self, kind: str, job: Job, **values: Any) -> None:
        if kind != "stop" or not self._plan.is_killed:
            flush_opened_files()
        parts = [part for state in job.states for part in state.parts()]
        # What the job alone reads: after a restart it knows fewer places.
        parts += [state for state in job.states if isinstance(state, Anchors)]
        states = [
            state
            for state in job.states
            if state not in parts and can_be_read(state, job.world_size)
        ]
        fields: dict[str, Any] = {}
        for state in states:
            fields |= read_state(state, job.world_size)
        self.note(
            kind,
            fields=fields,
            random=fields_of_generators(job.device),
            files=self.changed_files(),
            variables=self.variables(job),
            states=[state.name for state in states],
            **values,
        )

    def variables(self, job: Job, *, only: Sequence[str] = ()) -> dict[str, Any]:
        registered = {id(each) for state in job.states for each in objects_of(state)}
        return plain_variables(self._root, registered=registered, only=only)

    def changed_files(self) -> dict[str, Any]:
        """Return the files that differ from the start of the run."""
        return changes(self._base, self._files.look())

    def close(self) -> None:
        self._file.close()


def last_boundary(plan: Plan) -> RestartPlace | None:
    """Return where the leg before stopped, perhaps later than it was asked to."""
    notes = Path(plan.records) / f"{plan.leg - 1}-0.jsonl"
    lines = notes.read_text().splitlines() if plan.leg else []
    # Not all of them are read as JSON: what is noted at a moment may be long.
    own = [line for line in lines if line.startswith('{"kind": "boundary"')]
    return RestartPlace(*json.loads(own[-1])["place"]) if own else None


def can_be_read(state: BaseState, world_size: int) -> bool:
    """Return whether a state is whole without asking the other replicas."""
    if isinstance(state, MetricState):
        is_whole = not find_metrics(state.target)
    elif isinstance(state, StatefulState) and type(state).sync is StatefulState.sync:
        is_whole = not hasattr(state.target, "consolidate_state_dict")
    else:
        is_whole = type(state).sync is BaseState.sync
    return world_size == 1 or is_whole


def read_state(state: BaseState, world_size: int) -> dict[str, Any]:
    """Return a state's fields."""
    if world_size == 1:
        state.sync()
    return fields_of_state(state)


def objects_of(state: BaseState) -> list[Any]:
    """Return what a state keeps, so that it does not count as a plain variable."""
    kept = [value for value in vars(state).values() if hasattr(value, "__dict__")]
    return [state, *kept, *(getattr(each, "module", None) for each in kept)]
