"""The job of a checked replica: it shortens loops, records states, and stops."""

from __future__ import annotations

import os
import signal
from typing import Any

from elasticrun.check.replica.recorder import Recorder, last_boundary
from elasticrun.check.runs.plan import Plan
from elasticrun.check.runs.scenarios import RestartPlace
from elasticrun.checkpoint.position import Position
from elasticrun.errors import STOPPED
from elasticrun.job.boundary import Boundary
from elasticrun.job.job import Job
from elasticrun.job.loop import LoopedLoader
from elasticrun.replicas.agreement import STOP
from elasticrun.replicas.environment import Environment
from elasticrun.saving.settings import Settings


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

    # Moments.

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
        self, loader: LoopedLoader, where: str, *, start: int = 0
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
            self.recorder.note_moment(kind, self, **values)

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
