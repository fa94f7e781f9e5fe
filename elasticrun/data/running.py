"""What changes within a loop, and what is said and written about it."""

from __future__ import annotations

import os
from types import FrameType

from elasticrun.data.plan import MicroBatch, Part
from elasticrun.errors import LoopOrderError, StateNameError
from elasticrun.job import Job
from elasticrun.position import Position
from elasticrun.trace import Trace

_NO_BATCH: MicroBatch = (0, [], Part(0, 0, 0, 0, True))


class RunningLoop:
    """What changes within a loop; apart, since torch guards a loader's attributes."""

    __slots__ = ("current", "where")

    def __init__(self, where: str = "no loop") -> None:
        self.current = _NO_BATCH
        self.where = where

    @property
    def part(self) -> Part:
        return self.current[2]


def describe(frame: FrameType) -> str:
    """Return where a program stands, as "file.py:line"."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def trace_batch(trace: Trace, current: MicroBatch, start: Position) -> None:
    """Write that a micro-batch is delivered, in the loop that began at `start`."""
    batch, indices, part = current
    trace.write(
        epoch=start.finished_epochs,
        loop=start.finished_loops,
        batch=batch,
        micro=part.micro,
        indices=indices,
        num_valid=part.num_valid,
    )


def check_place(job: Job, name: str | None) -> None:
    """Refuse a loader that a restart would not make again under the same name.

    Raises:
        StateNameError: The name is empty.
        LoopOrderError: It is made inside a loop, or unnamed inside an epoch.
    """
    if name is not None and not name:
        raise StateNameError(
            "name='' cannot name a loader. Give it a name that tells what it is for, "
            "or none at all."
        )
    if job.loader is not None:
        raise LoopOrderError(
            f"a loader is being made inside the loop over `{job.loader.name}` "
            f"({job.loader.where}). After a restart that loop continues in the middle, "
            "and loaders made before would be missing. Make all loaders before the "
            "epoch loop."
        )
    if job.is_in_epoch and name is None:
        raise LoopOrderError(
            f"a loader without a name is being made in epoch "
            f"{job.progress.finished_epochs}. Loaders without a name are known by the "
            "order in which they are made, which differs after a restart, when earlier "
            "epochs are skipped. Make it before the epoch loop, or give it a name= of "
            "its own in each epoch."
        )
