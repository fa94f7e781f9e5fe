"""The job of a replica that is looked at: it cuts loops short, notes, and stops."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from elasticrun.check.perturbation import Perturbation
from elasticrun.check.places import Place
from elasticrun.check.plan import KILL, Plan
from elasticrun.check.recorder import Recorder
from elasticrun.control.agreement import STOP
from elasticrun.env import Environment
from elasticrun.job import EXIT_CODE_ASKED, Job
from elasticrun.position import Position

if TYPE_CHECKING:
    from elasticrun.data.loader import AdaptiveDataLoader


class CheckedJob(Job):
    """Does what its plan says; the program cannot tell it from any other job."""

    def __init__(
        self,
        plan: Plan,
        environment: Environment | None = None,
        *,
        backend: str = "auto",
        **_: Any,
    ) -> None:
        super().__init__(
            environment,
            checkpoint_dir=plan.checkpoints,
            save_interval="off",
            backend=backend,
        )
        self._plan = plan
        self._recorder = Recorder(plan) if self.rank == 0 else None
        self._num_epochs_cut = 0
        self._loop = (0, 0, False)
        self._num_batches = 0
        self._is_doomed = False
        self._perturbation = Perturbation() if plan.is_perturbed else None
        self._note("start")

    @property
    def recorder(self) -> Recorder | None:
        """Where this replica notes what it sees, if it does."""
        return self._recorder

    @property
    def states(self) -> Any:
        """The registered states."""
        return self._registry

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
        """Return how many samples a loop delivers."""
        return self._plan.limits.samples(num_samples, batch_size)

    # Moments.

    def begin_epoch(self) -> None:
        """Enter the next epoch, and note what everything is at."""
        super().begin_epoch()
        self._set_zone("A")
        kind = "rebegin" if self.progress.is_replaying else "begin"
        self._note(kind, epoch=self.progress.finished_epochs)

    def end_epoch(self) -> None:
        """Note what everything is at, and finish the epoch."""
        self._note("end", epoch=self.progress.finished_epochs)
        super().end_epoch()
        self._set_zone("D")

    def begin_loop(self, loader: AdaptiveDataLoader, where: str) -> Position | None:
        """Begin a loop, and note what everything is at."""
        was_replaying = self.progress.is_replaying
        epoch, loop, in_epoch = self.progress.place
        position = super().begin_loop(loader, where)
        kind = "skip"
        if position is not None:
            epoch, loop = position.finished_epochs, position.finished_loops
            in_epoch = position.in_epoch
            is_continued = was_replaying and position.index > 0
            kind = "continue" if is_continued else "enter"
            self._loop = (epoch, loop, in_epoch)
            self._num_batches = -(-position.index // (loader.batch_size or 1))
        self._note(
            kind, epoch=epoch, loop=loop, in_epoch=in_epoch, where=where,
            loader=loader.name, num_batches=len(loader),
        )  # fmt: skip
        self._set_zone("B" if position is None else "L")
        return position

    def end_loop(self, *, is_finished: bool) -> None:
        """Leave the loop, and note what everything is at."""
        loader = self.loader
        super().end_loop(is_finished=is_finished)
        self._set_zone("B")
        if is_finished and loader is not None:
            epoch, loop, in_epoch = self._loop
            self._note(
                "leave", epoch=epoch, loop=loop, in_epoch=in_epoch,
                num_batches=self._num_batches,
            )  # fmt: skip

    def pass_boundary(self, *, ends_epoch: bool = False, may_end: bool = False) -> None:
        """Pass a boundary; stop, save or die there if the plan says so."""
        if self._is_doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._place() == self._plan.until:
            self._note("stop")
            if self._plan.ending == KILL:
                self._is_doomed = True
                super().pass_boundary(ends_epoch=ends_epoch, may_end=may_end)
                self.save()
                return
            self._gate.schedule(STOP, "elasticrun check", EXIT_CODE_ASKED)
        if self._perturbation is not None:
            self._perturbation.apply(self._registry)
        super().pass_boundary(ends_epoch=ends_epoch, may_end=may_end)

    def close(self) -> None:
        """Note what everything ended at, and leave the job."""
        if not self.is_closed and os.getpid() == self.pid and self._recorder:
            self._note("exit")
            self._recorder.close()
            self._recorder = None
        super().close()

    def _place(self) -> Place:
        if self.loader is None:
            return Place(self.progress.finished_epochs - 1, -1, 0)
        self._num_batches += 1
        epoch, loop, in_epoch = self._loop
        return Place(epoch, loop, self._num_batches, in_epoch)

    def _note(self, kind: str, **values: Any) -> None:
        if self._recorder is not None:
            self._recorder.note_moment(kind, self, self._registry, **values)

    def _set_zone(self, zone: str) -> None:
        if self._recorder is not None:
            self._recorder.zone = zone
