"""The loops without a loader: `remaining_epochs_until`, `remaining_steps_until`."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import BinaryIO

from elasticrun.checkpoint.position import STEPS
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.errors import LoopOrderError, counted
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import Cursor, LoopStart, StepLoop
from elasticrun.job.open_loop import OpenLoop, is_left_by_break, iterate, line_of
from elasticrun.logger import Logger

logger = Logger(__name__)


def remaining_epochs_until(num_epochs: int, start: int = 0) -> Iterator[int]:
    """Yield the numbers of the epochs that remain until `num_epochs` are finished.

    `num_epochs` is a total for the job: several epoch loops one after another continue
    the numbering. The end of an epoch is a boundary, and the end of the last one writes
    a checkpoint. `break` finishes the epoch, an exception does not.

    Collective: every replica must walk the same epochs.
    Replay: finished epochs are not yielded; the interrupted one is, and its finished
    loops are skipped.

    Args:
        num_epochs: How many epochs the job has.
        start: The number that the first one is given: 1 for programs that count
            `range(1, num_epochs + 1)`. Messages and checkpoints number epochs from 0
            all the same.

    Raises:
        LoopOrderError: Epoch loops are nested, or loops are not those of the
            checkpoint.
        JobStopped: The job stops at the end of an epoch.
        ValueError: `num_epochs` is not a whole number from 0 up.
    """
    num_epochs = whole_number(num_epochs, "remaining_epochs_until", "epochs")
    return _remaining_epochs(num_epochs, operator.index(start))


def whole_number(number: int, function: str, what: str) -> int:
    """Return a number of epochs, steps or batches as a plain integer."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(
            f"{function} takes the number of {what} as a whole number, not {number!r}."
        )
    number = operator.index(number)
    if number < 0:
        raise ValueError(f"{function}({number}): {what} count from 0.")
    return number


def _remaining_epochs(num_epochs: int, start: int) -> Iterator[int]:
    job = current_job()
    check_not_nested(job)
    num_epochs = job.progress.num_epochs = job.epochs_until(num_epochs)
    epoch = job.skip_epochs(num_epochs)
    if epoch >= num_epochs:
        say_finished(job, counted(job.progress.finished_epochs, "epoch"))
        job.progress.end_epoch_loop()
        return
    while epoch < num_epochs:
        job.begin_epoch()
        try:
            yield epoch + start
        except GeneratorExit:
            if is_left_by_break(sys._getframe().f_back):
                with job.deferred_error.keeping():
                    job.end_epoch()
                    job.end_epoch_loop(is_left=True)
                    job.boundary.finish_epochs()
            else:
                job.leave_epoch()
            raise
        job.end_epoch()
        job.boundary.reach(ends_epoch=True)
        epoch = job.progress.finished_epochs
    job.end_epoch_loop()
    job.boundary.finish_epochs()


def current_epoch() -> int | None:
    """Return the number of the running epoch, or None outside epoch loops."""
    job = current_job()
    return job.progress.finished_epochs if job.is_in_epoch else None


def finished_epochs() -> int:
    """Return how many epochs are finished, after a restart those of the checkpoint."""
    return current_job().progress.position.finished_epochs


def check_not_nested(job: Job) -> None:
    """Refuse an epoch loop in the body of another loop."""
    if job.is_in_epoch:
        raise LoopOrderError(
            f"an epoch loop began inside epoch {job.progress.finished_epochs} of "
            "another one. Epochs of a job are numbered one after another, so they "
            "cannot be nested. Leave the outer loop first, or use a plain range() for "
            "one of them."
        )
    if job.loader is not None:
        raise LoopOrderError(
            f"an epoch loop began inside the loop over `{job.loader.name}` "
            f"({job.loader.where}). Leave that loop first."
        )


def say_finished(job: Job, what: str) -> None:
    """Say why nothing happens, if the job stands where the loop had ended.

    Args:
        what: The loop is made of, as "5 steps".
    """
    is_there = job.progress.is_at_place and not job.is_in_epoch
    if job.has_resumed and job.rank == 0 and is_there:
        logger.warning(
            "%s finished before this start, so none remains, and what follows the loop "
            "runs again. To train longer, raise the number; to start anew, use another "
            "directory.",
            what,
        )


def remaining_steps_until(num_steps: int, start: int = 0) -> Iterator[int]:
    """Yield the numbers of the steps that remain until `num_steps` are finished.

    For loops that draw their batches themselves: language models from random windows,
    reinforcement learning, simulations. The end of each step is a boundary, at which
    the job may save and stop. A loop over a loader in a step's body belongs to that
    step. `num_steps` is a total for the job: several such loops one after another
    continue the numbering. Outside of epochs, the end of the loop writes a checkpoint.

    Every replica takes every step, and `AdaptiveDataParallel` takes the mean of their
    gradients. What each draws must depend on its rank, as its own random generators do.

    Collective: every replica must take the same steps.
    Replay: finished steps are not yielded; the random generators come back when the
    next one is.

    Args:
        num_steps: How many steps the job has.
        start: The number that the first one is given: 1 for programs that count
            `range(1, num_steps + 1)`.

    Raises:
        LoopOrderError: It stands in the body of another loop, or the loops are not
            those of the checkpoint.
        JobStopped: The job stops at the end of a step.
        ValueError: `num_steps` is not a whole number from 0 up.
    """
    num_steps = whole_number(num_steps, "remaining_steps_until", "steps")
    return iterate(partial(_begin_steps, num_steps, operator.index(start)))


def _begin_steps(num_steps: int, first: int, frame: FrameType) -> OpenLoop | None:
    job = current_job()
    where = line_of(frame)
    if job.loader is not None:
        raise LoopOrderError(
            f"remaining_steps_until ({where}) stands in the body of the loop over "
            f"`{job.loader.name}` ({job.loader.where}). Its steps are counted for the "
            "whole job, so it cannot be part of one batch. Use a plain range() there."
        )
    cursor = job.get_or_make(_StepsState).cursor
    start = cursor.start if cursor.place == job.progress.place else cursor.end
    num_left = job.limit_steps(max(num_steps - start, 0))
    assert num_left is not None  # It has an end.
    num_steps = min(num_steps, start + num_left)
    loop = StepLoop(STEPS, num_steps, where, world_size=job.world_size)
    step = _first_step(job, loop, cursor)
    if step is None:
        say_finished(job, counted(len(loop), "step"))
        return None
    epoch, num_loops, _ = job.progress.place
    return OpenLoop(
        job,
        loop,
        LoopStart(epoch, num_loops, (), step, 0),
        cursor=cursor,
        read=lambda: map(first.__add__, loop.steps_from(step)),
    )


def _first_step(job: Job, loop: StepLoop, cursor: Cursor) -> int | None:
    """Begin the loop; return its first step, or None if it is to be skipped."""
    place = job.progress.place
    is_known = cursor.place == place and cursor.is_complete
    start = job.begin_loop(loop, loop.where, start=cursor.end)
    if start is not None:
        cursor.begin(start.place)
        return start.index
    if not is_known or cursor.end >= len(loop):
        return None
    # It had come to its end, which was an earlier one than now.
    if job.reopen_loop(loop, loop.where, cursor.end):
        return cursor.end
    raise LoopOrderError(
        f"remaining_steps_until({len(loop)}) ({loop.where}) had ended after "
        f"{counted(cursor.end, 'step')}, and the checkpoint is from later, at "
        f"{job.progress.position}. To take more steps, put another loop with that "
        "number at the end of the program; or start anew with another checkpoint "
        "directory."
    )


class _StepsState(BaseState):
    """Keeps how many steps the job has taken."""

    def __init__(self) -> None:
        super().__init__("remaining-steps")
        self.cursor = Cursor()

    def remember(self) -> Callable[[], None]:
        return self.cursor.remember()

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self.cursor.encode()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        body = current_job().progress.body
        self.cursor.decode(json.loads(fileobj.read()), resume=body)
