"""Runs any loop: delivers its batches, counts them, and stops at boundaries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple

from elasticrun.errors import LoopOrderError
from elasticrun.job.cursor import Cursor
from elasticrun.job.job import Job
from elasticrun.job.leaving import is_left_by_break
from elasticrun.job.loop import NOTHING, LoopedLoader

# How a loop ends: by itself, by `break`, by an exception in its body, or by one in what
# delivers it.
LoopEnd = Literal["over", "break", "exception", "failed"]


class LoopStart(NamedTuple):
    """Where a loop begins.

    Attributes:
        epoch: The epochs that are finished.
        num_loops: The loops that are finished since the last epoch was.
        inside: What tells it from others in the same body; empty outside of loops.
        at: The index at which it goes on, 0 unless it was interrupted.
        offset: Of a loop over endless passes, where in these its index 0 is; None of
            one over a single pass.
    """

    epoch: int
    num_loops: int
    inside: tuple[int, ...]
    at: int
    offset: int | None


class OpenLoop:
    """A loop that has begun and not ended, over a loader or of steps.

    Args:
        loader: What is looped over.
        start: Where the loop begins.
        cursor: Remembers how far it comes, if the next one goes on from there.
        read: Starts to read; returns an iterator that makes each micro-batch the
            loader's current one, and then yields what is delivered for it. That is
            `NOTHING` for a global batch of which all samples are other replicas'.
        stop: Ends what reads, and is told how the loop ends.

    Attributes:
        job: The job that the loop is a part of.
        index: Of the next global batch; counted also where it is no part of a position.
    """

    def __init__(
        self,
        job: Job,
        loader: LoopedLoader,
        start: LoopStart,
        *,
        cursor: Cursor | None = None,
        read: Callable[[], Iterator[Any]],
        stop: Callable[[LoopEnd], None] | None = None,
    ) -> None:
        self.job = job
        self._loader = loader
        self._start = start
        self._cursor = cursor
        self.read = read
        self._stop = stop
        self.index = start.at

    def finish_iteration(self) -> None:
        """Count what the body was given; after a whole global batch is a boundary.

        A loop in the body of another one has none: it belongs to the batch around it.

        Raises:
            LoopOrderError: A loop that began in the body is open.
            ElasticRunError: Another replica has trained on what was left out here.
            JobStopped: The job stops here.
        """
        job = self.job
        if job.loader is not self._loader:
            raise job.loops.overlap_error(self._loader)
        part = self._loader.running_loop.current.part
        if not part.is_step:
            return
        self.index += part.advance
        if job.virtual is not None:
            job.virtual.end_batch()
        if not self._start.inside:
            job.progress.advance(part.advance)
            job.in_step.finish_batch(self._loader)
            job.boundary.reach()

    def leave_iteration(self, *, is_break: bool) -> None:
        """Take the batch in whose body the loop is left for delivered."""
        part = self._loader.running_loop.current.part
        self.index += part.advance
        if is_break and part.is_step and self.job.virtual is not None:
            self.job.virtual.end_batch()

    def end(self, ending: LoopEnd) -> None:
        """Leave the loop."""
        part = self._loader.running_loop.current.part
        try:
            if self._stop is not None:
                self._stop(ending)
        finally:
            if self._cursor is not None:
                end = (self._start.offset or 0) + self.index
                self._cursor.leave(end, is_complete=ending == "over")
            if self._start.inside:
                self.job.end_inside(self._loader)
            else:
                self.job.end_loop(is_finished=ending in ("over", "break"))
        virtual = self.job.virtual
        if virtual is not None and ending == "break" and not part.is_step:
            with self.job.deferred_error.keeping():  # Python would swallow it here.
                raise LoopOrderError(
                    f"a loop over `{self._loader.name}` was left by `break` in share "
                    f"{part.share} of a global batch, of which "
                    f"virtual_replicas={virtual.number} are trained one after the "
                    "other. At another number of replicas more or fewer of them would "
                    "have been. Leave it in the batch's last one: `if train.is_step: "
                    "break`."
                )

    def save_behind(self) -> None:
        """Write a checkpoint behind a loop that may be the program's last one.

        Such a loop stands outside of epochs, and others go on where it has ended.
        """
        is_outside = not (self._start.inside or self.job.is_in_epoch)
        if self._cursor is not None and is_outside:
            self.job.boundary.finish_epochs()


def iterate(begin: Callable[[FrameType], OpenLoop | None]) -> Iterator[Any]:
    """Yield what a loop delivers; all loops of `for` are in here while they run.

    Args:
        begin: Begins the loop, which the program asks for in a frame; or returns None
            if it is to be skipped.
    """
    loop = begin(sys._getframe(1))
    if loop is None:
        return
    ending: LoopEnd = "failed"  # Unless something else is found out.
    batches: Iterator[Any] = iter(())
    try:
        batches = loop.read()
        loop.job.continue_loop()
        for batch in batches:
            if batch is not NOTHING:
                yield batch
            loop.finish_iteration()
        ending = "over"
    except GeneratorExit:
        is_break = is_left_by_break(sys._getframe().f_back)
        loop.leave_iteration(is_break=is_break)
        ending = "break" if is_break else "exception"
        raise
    finally:
        # An exception may keep this frame, and with it persistent workers; the garbage
        # collector takes 5 s to end each of them.
        del batches
        loop.end(ending)
    loop.save_behind()
