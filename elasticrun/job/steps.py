"""The loop without a loader: `remaining_steps_until`."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import BinaryIO

from elasticrun.checkpoint.position import STEPS
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.errors import LoopOrderError, counted
from elasticrun.job.current import current_job
from elasticrun.job.cursor import Cursor
from elasticrun.job.epochs import whole_number
from elasticrun.job.job import Job
from elasticrun.job.loop import LoopOfSteps, LoopStart
from elasticrun.job.open_loop import OpenLoop, iterate, line_of


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
    return iterate(partial(_begin, num_steps, operator.index(start)))


def _begin(num_steps: int, first: int, frame: FrameType) -> OpenLoop | None:
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
    loop = LoopOfSteps(STEPS, num_steps, where, world_size=job.world_size)
    step = _first_step(job, loop, cursor)
    if step is None:
        return None
    epoch, num_loops, _ = job.progress.place
    return OpenLoop(
        job,
        loop,
        LoopStart(epoch, num_loops, (), step, 0),
        cursor=cursor,
        read=lambda: map(first.__add__, loop.steps_from(step)),
    )


def _first_step(job: Job, loop: LoopOfSteps, cursor: Cursor) -> int | None:
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
