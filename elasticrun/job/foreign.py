"""`ForeignLoop`: position and boundaries in a loop that another library runs."""

from __future__ import annotations

import sys

from elasticrun.checkpoint.position import STEPS_OF
from elasticrun.errors import LoopOrderError
from elasticrun.job.current import current_job
from elasticrun.job.loop import MicroBatch, StepLoop
from elasticrun.job.open_loop import line_of
from elasticrun.job.remaining import check_not_nested, whole_number


class ForeignLoop:
    """The epochs and steps of a trainer that owns its loop, as the job knows of them.

    Such a trainer says where it is, and the job saves, stops and resumes there:

        loop = ForeignLoop("trainer")
        while finished_epochs() < num_epochs:
            epoch, step = loop.begin(len(loader))
            for batch, share in loader.read(epoch, step):
                loop.take(share)
                loss = criterion(net(batch)) * loop.loss_weight
                ...  # Train, log, evaluate: all that belongs to the step.
                loop.pass_boundary()
            loop.end()
        loop.finish()

    The job saves only in `pass_boundary`, `end` and `finish`. Keep what the trainer
    counts or sums up in a `State`, or `register` it. A loop over an
    `AdaptiveDataLoader` in the body of a step, for example of an evaluation, belongs to
    that step, and is repeated with it.

    Collective: make it, and call all methods except `take`, on every replica alike.
    Replay: nothing of the trainer is replayed; `begin` says where it goes on.

    Args:
        name: What checkpoints and messages call the loop.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._job = current_job()
        self._loop: StepLoop | None = None

    def begin(
        self, num_steps: int, *, epoch: int | None = None, step: int | None = None
    ) -> tuple[int, int]:
        """Enter the epoch at which the job stands; return it and its finished steps.

        The random generators come back here, if the job resumes in this epoch: call it
        right before the first batch is asked for.

        Args:
            num_steps: Of the whole epoch, resumed or not.
            epoch: Where the trainer stands by its own count, to be compared.
            step: How many steps of it are finished by that count.

        Raises:
            LoopOrderError: The trainer is elsewhere by its own count; or another loop
                is open, or came between this epoch and the one before.
            JobStopped: The job has stopped before.
        """
        job, progress = self._job, self._job.progress
        num_steps = whole_number(num_steps, f"{self.name}: begin", "steps")
        check_not_nested(job)
        progress.skip_epochs(progress.position.finished_epochs)
        resume = progress.position
        job.begin_epoch()
        loop = StepLoop(
            STEPS_OF + self.name,
            num_steps,
            line_of(sys._getframe(1)),
            world_size=job.world_size,
        )
        start = job.begin_loop(loop, loop.where)
        if start is None:
            raise LoopOrderError(
                f"the job resumes at {resume}, after a loop that ran between two "
                f"epochs of `{self.name}`. There it cannot tell these epochs from that "
                "loop. Loop over other loaders in the body of a step, before end(), or "
                "after finish()."
            )
        here = (start.finished_epochs, start.index)
        self._check_counts(here, epoch, step)
        loop.begin_step(start.index)
        self._loop = loop
        job.continue_loop()
        return here

    def _check_counts(
        self, here: tuple[int, int], epoch: int | None, step: int | None
    ) -> None:
        """Refuse to go on where the trainer is elsewhere by its own count."""
        told = (here[0] if epoch is None else epoch, here[1] if step is None else step)
        if told != here:
            raise LoopOrderError(
                f"`{self.name}` is at step {told[1]} of epoch {told[0]} by its own "
                f"count, but the job is at step {here[1]} of epoch {here[0]}. Samples "
                "would be skipped or seen twice. Keep the trainer's count in a State, "
                "so that both come from one checkpoint."
            )

    def take(self, share: MicroBatch) -> None:
        """Train with a micro-batch now; `share` came with it from `loader.read`.

        Those read ahead count for nothing before that. A trainer that never calls this
        gives every replica the same weight.
        """
        loop, job = self._running("take"), self._job
        loop.current = share
        if job.trace is not None:
            job.trace.write(
                epoch=job.progress.finished_epochs,
                loop=0,
                batch=share.number,
                micro=share.part.micro,
                indices=[int(index) for index in share.indices],
                num_valid=share.part.num_valid,
                places=share.places,
            )

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with before replicas are averaged; else 1.0.

        The share of the micro-batch that was taken in its global batch, times the world
        size. `AdaptiveDataParallel` does this by itself.
        """
        return 1.0 if self._loop is None else self._loop.loss_weight

    @property
    def is_step(self) -> bool:
        """Whether the micro-batch that was taken completes its global batch."""
        return True if self._loop is None else self._loop.is_step

    @property
    def num_valid(self) -> int:
        """How many samples of that micro-batch are real, and not padding."""
        return self._running("num_valid").current.part.num_valid

    def pass_boundary(self, num_steps: int = 1) -> None:
        """Count steps as finished with all that belongs to them; save or stop if due.

        Call it after logs, evaluations and callbacks of the step, and before the next
        one. It need not come after the last step of an epoch, of which `end` follows.
        Most of the time it costs less than a microsecond.

        Args:
            num_steps: With 0, the step goes on, and the trainer keeps in states of its
                own how far it has come in it.

        Raises:
            JobStopped: The job stops here; the checkpoint is written.
            LoopOrderError: The loop has not begun, or one in its body is open.
        """
        loop, job = self._running("pass_boundary"), self._job
        if job.loader is not loop:
            raise job.loops.overlap_error(loop)
        job.progress.index += num_steps
        loop.begin_step(job.progress.index)
        job.boundary.reach()

    def end(self) -> None:
        """Finish the epoch; its end is a boundary.

        Raises:
            JobStopped: The job stops here; the checkpoint is written.
        """
        self._running("end")
        self._loop = None
        self._job.end_loop(is_finished=True)
        self._job.end_epoch()
        self._job.boundary.reach(ends_epoch=True)

    def leave(self) -> None:
        """Leave the epoch unfinished, for example after an exception that is caught.

        The next `begin` goes on at the last boundary. Does nothing between epochs.
        """
        if self._loop is not None:
            self._loop = None
            self._job.end_loop(is_finished=False)
            self._job.leave_epoch()

    def finish(self) -> None:
        """Finish the last epoch loop: write a checkpoint, if anything was trained."""
        job = self._job
        is_replayed = job.progress.is_replaying
        job.skip_epochs(job.progress.position.finished_epochs)
        job.end_epoch_loop()
        if not is_replayed:
            job.boundary.finish_epochs()

    def _running(self, method: str) -> StepLoop:
        if self._loop is None:
            raise LoopOrderError(
                f"{method} of the foreign loop `{self.name}` came outside of an epoch. "
                "Call it between begin() and end()."
            )
        return self._loop
