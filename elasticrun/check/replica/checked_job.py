"""The job of a checked replica: it shortens loops, records states, and stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrun.check.replica.fields import (
    fields_of_generators,
    fields_of_state,
    plain_variables,
)
from elasticrun.check.replica.file_watch import FileWatch, changes, flush_opened_files
from elasticrun.check.scenarios import Plan, RestartPlace
from elasticrun.checkpoint.files.durable import open_append
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.states.metrics import MetricState, find_metrics
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.errors import STOPPED
from elasticrun.job.boundary import Boundary
from elasticrun.job.job import Job
from elasticrun.job.loop import LoaderInLoop
from elasticrun.job.replay import Anchors
from elasticrun.replicas.agreement import STOP
from elasticrun.replicas.environment import Environment
from elasticrun.saving.settings import Settings

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
        if plan.generation == 0 and not base.exists():
            self._records.mkdir(parents=True, exist_ok=True)
            base.write_text(json.dumps(self._files.look()))
        self._base = json.loads(base.read_text())
        # Read as a trace is: one file a generation, of which rank 0 notes.
        self._file = open_append(self._records / f"{plan.generation}-0.jsonl")

    def note(self, kind: str, **values: Any) -> None:
        line = {
            "kind": kind,
            "generation": self._plan.generation,
            "zone": self.zone,
            **values,
        }
        text = json.dumps(line)
        if kind != "line":  # A state may hold a path, and each run has its own folder.
            text = text.replace(self._root, "")
        self._file.write(f"{text}\n")

    def note_snapshot(self, kind: str, job: Job, **values: Any) -> None:
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
        # What a state keeps counts as no plain variable.
        kept: list[Any] = [*job.states]
        for state in job.states:
            held = [each for each in vars(state).values() if hasattr(each, "__dict__")]
            kept += [*held, *(getattr(each, "module", None) for each in held)]
        registered = set(map(id, kept))
        return plain_variables(self._root, registered=registered, only=only)

    def changed_files(self) -> dict[str, Any]:
        """Return the files that differ from the start of the run."""
        return changes(self._base, self._files.look())

    def close(self) -> None:
        self._file.close()


def last_boundary(plan: Plan) -> RestartPlace | None:
    """Return where the last generation stopped, perhaps later than it was to."""
    notes = Path(plan.records) / f"{plan.generation - 1}-0.jsonl"
    lines = notes.read_text().splitlines() if plan.generation else []
    # Not all of them are read as JSON: a snapshot may be long.
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


class CheckedJob(Job):
    """A job that follows a plan; to the program it is like any other job.

    Attributes:
        recorder: Where this replica notes what it sees; None on all but rank 0.
    """

    def __init__(
        self,
        plan: Plan,
        environment: Environment | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._plan = plan
        # A check decides itself when to save; of the program's settings it needs
        # those without which the program could not run.
        given = settings or Settings()
        super().__init__(
            environment,
            Settings.read(
                checkpoint_dir=plan.checkpoints,
                save_interval="off",
                trust_pickle=given.trust_pickle,
                backend=given.backend,
                virtual_replicas=given.virtual_replicas,
            ),
        )
        self.recorder = Recorder(plan) if self.rank == 0 else None
        self._stopped = last_boundary(plan)
        self._num_epochs_cut = 0
        self._at = RestartPlace(0, 0, 0, False)
        self.note("start", virtual_replicas=self.settings.virtual_replicas)

    # Less than the whole program.

    def epochs_until(self, num_epochs: int) -> int:
        """Return where an epoch loop is to end.

        Epochs that were cut from one epoch loop do not come back in the next one, whose
        number is a total for the job.
        """
        most = self._plan.limits.max_epochs
        if not most:
            return num_epochs
        end = num_epochs - self._num_epochs_cut
        cut = min(end, self.progress.finished_epochs + most)
        self._num_epochs_cut += end - cut
        return max(cut, 0)

    def samples_of(self, num_samples: int, batch_size: int) -> int:
        return self._plan.limits.samples(num_samples, batch_size)

    def limit_steps(self, num_steps: int | None) -> int | None:
        """Return how many steps a loop that counts them has, be it endless or not."""
        most = self._plan.limits.max_batches
        if not most:
            return num_steps
        return most if num_steps is None else min(num_steps, most)

    # Snapshots.

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._set_zone("A")
        if not self.progress.is_replaying:
            self.note("begin", epoch=self.progress.finished_epochs)

    def _reach_anchor(self, *, is_first: bool = False) -> None:
        # Here, since what an anchor shows is no change that replayed code has made.
        if is_first and self.progress.is_replaying:
            self.note("rebegin", epoch=self.progress.finished_epochs)
        super()._reach_anchor(is_first=is_first)

    def end_epoch(self) -> None:
        self.note("end", epoch=self.progress.finished_epochs)
        super().end_epoch()
        self._set_zone("D")

    def begin_loop(
        self, loader: LoaderInLoop, where: str, *, start: int = 0
    ) -> Position | None:
        stopped = self._stopped if self.progress.is_replaying else None
        epoch, loop, in_epoch = self.progress.place
        position = super().begin_loop(loader, where, start=start)
        kind = "skip"
        if position is not None:
            epoch, loop, in_epoch = position.place
            self._at = RestartPlace(epoch, loop, 0, in_epoch)
            kind = "enter"
            if stopped is not None and stopped._replace(batch=0) == self._at:
                self._at, kind = stopped, "continue"
        self.note(
            kind, epoch=epoch, loop=loop, in_epoch=in_epoch, num_batches=len(loader)
        )
        self._set_zone("B" if position is None else "L")
        return position

    def end_loop(self, *, is_finished: bool) -> None:
        loader = self.loader
        super().end_loop(is_finished=is_finished)
        self._set_zone("B")
        if is_finished and loader is not None:
            epoch, loop, num_batches, in_epoch = self._at
            self.note(
                "leave", epoch=epoch, loop=loop, in_epoch=in_epoch,
                num_batches=num_batches,
            )  # fmt: skip

    def make_boundary(self, **parts: Any) -> CheckedBoundary:
        return CheckedBoundary(self, self._plan, **parts)

    def close(self) -> None:
        if self.recorder and not self.is_closed and os.getpid() == self.pid:
            self.note("exit")
            self.recorder.close()
            self.recorder = None
        super().close()

    def next_place(self) -> RestartPlace:
        """Count a batch, if a loop is running, and return where the program is."""
        if self.loader is None:
            return RestartPlace(self.progress.finished_epochs - 1, -1, 0)
        self._at = self._at._replace(batch=self._at.batch + 1)
        return self._at

    def note(self, kind: str, **values: Any) -> None:
        if self.recorder is not None:
            self.recorder.note_snapshot(kind, self, **values)

    def _set_zone(self, zone: str) -> None:
        if self.recorder is not None:
            self.recorder.zone = zone


class CheckedBoundary(Boundary):
    """Stops, saves or dies where the plan says so, on all replicas alike."""

    decides = False  # Runs would differ.

    def __init__(self, job: CheckedJob, plan: Plan, **parts: Any) -> None:
        super().__init__(**parts)
        self._job = job
        self._plan = plan
        self._is_doomed = False

    def reach(self, *, ends_epoch: bool = False) -> None:
        if self._is_doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        place = self._job.next_place()
        if self._job.recorder is not None:
            is_put_off = self.is_waiting
            self._job.recorder.note("boundary", place=place, is_put_off=is_put_off)
        if place == self._plan.until:
            self._job.note("stop")
            if self._plan.is_killed:
                self._is_doomed = True
                super().reach(ends_epoch=ends_epoch)
                self.save()
                return
            self._gate.schedule(STOP, "elasticrun check", STOPPED)
        super().reach(ends_epoch=ends_epoch)
