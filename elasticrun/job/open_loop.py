"""Runs any loop: delivers its batches, counts them, and stops at boundaries.

The loop is a generator, and Python closes it with GeneratorExit when the `for` around
it drops it: after `break` and after an exception. What differs is the current
instruction of the frame of that `for`: after `break` or `return` the one that pops the
iterator, after an exception the one that raised it. This holds in CPython only, which
also closes the generator at once. Any other end (a call of `close()`) counts as an
exception: the loop stays unfinished until another one begins.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from elasticrun.errors import LoopOrderError, is_of_package, is_of_program
from elasticrun.job.job import Job
from elasticrun.job.loop import (
    NOTHING,
    Cursor,
    LoaderInLoop,
    LoopEnd,
    LoopStart,
    MicroBatchInfo,
)


class Stopwatch(Protocol):
    """Times the steps of a loop."""

    def end_step(self, start: LoopStart, part: MicroBatchInfo) -> None:
        """Note that the body has done with a global batch, whose last part this is."""


class OpenLoop:
    """A loop that has begun and not ended, over a loader or of steps.

    Args:
        job: The job that the loop is a part of.
        loader: What is looped over.
        start: Where the loop begins.
        cursor: Remembers how far it comes, if the next one goes on from there.
        read: Starts to read; returns an iterator that makes each micro-batch the
            loader's current one, and then yields what is delivered for it. That is
            `NOTHING` for a global batch of which all samples are other replicas'.
        stop: Ends what reads, and is told how the loop ends.
        times: How long its steps take, if that is to be known.

    Attributes:
        index: Of the next global batch; counted also where it is no part of a position.
        has_ended: Whether it has, though a variable may hold its iterator.
    """

    def __init__(
        self,
        job: Job,
        loader: LoaderInLoop,
        start: LoopStart,
        *,
        cursor: Cursor | None = None,
        read: Callable[[], Iterator[Any]],
        stop: Callable[[LoopEnd], None] | None = None,
        times: Stopwatch | None = None,
    ) -> None:
        self.job = job
        self.loader = loader
        self.start = start
        self.times = times
        self._cursor = cursor
        self.read = read
        self._stop = stop
        self.index = start.at
        self.has_ended = False

    def end(self, ending: LoopEnd) -> None:
        """Leave the loop, once."""
        if self.has_ended:
            return
        self.has_ended = True
        job, part = self.job, self.loader.running_loop.current.part
        if ending in ("break", "exception"):  # The batch in its body was delivered.
            self.index += part.advance
        if ending == "break" and part.is_step and job.virtual is not None:
            job.virtual.end_batch(self.loader)
        try:
            if self._stop is not None:
                self._stop(ending)
        finally:
            if self._cursor is not None:
                end = (self.start.offset or 0) + self.index
                self._cursor.leave(end, is_complete=ending == "over")
            if self.start.inside:
                job.end_inside(self.loader)
            else:
                job.end_loop(is_finished=ending in ("over", "break"))
        if ending == "break" and not part.is_step and job.virtual is not None:
            with job.deferred_error.keeping():  # Python would swallow it here.
                raise LoopOrderError(
                    f"a loop over `{self.loader.name}` was left by `break` in share "
                    f"{part.share} of a global batch, of which "
                    f"virtual_replicas={job.virtual.number} are trained one after the "
                    "other. At another number of replicas more or fewer of them would "
                    "have been. Leave it in the batch's last one: `if train.is_step: "
                    "break`."
                )
        # The last loop of a program may be one over steps, or over endless passes,
        # outside of epochs. No end of an epoch saves behind it.
        is_outside = not (self.start.inside or job.is_in_epoch)
        if ending == "over" and self._cursor is not None and is_outside:
            job.boundary.finish_epochs()

    def overlap_error(self) -> LoopOrderError:
        """Return the error of a loop that goes on where it cannot."""
        if not self.has_ended:
            return self.job.loops.overlap_error(self.loader)
        return LoopOrderError(
            f"the loop over `{self.loader.name}` went on after the epoch or the job in "
            "which it began had ended. A loop belongs to one epoch, so it could not "
            "resume. Begin another one in each epoch, and do not keep an iterator."
        )


def iterate(begin: Callable[[FrameType], OpenLoop | None]) -> Iterator[Any]:
    """Yield what a loop delivers; all loops of `for` are in here while they run.

    Args:
        begin: Begins the loop, which the program asks for in a frame; or returns None
            if it is to be skipped.

    Raises:
        LoopOrderError: A loop that began in the body is open.
        ElasticRunError: Another replica has trained on what was left out here.
        JobStopped: The job stops here.
    """
    loop = begin(sys._getframe(1))
    if loop is None:
        return
    loop.job.loops.hold(loop.end, is_for=is_called_by_for_loop(sys._getframe(1)))
    job, loader, times = loop.job, loop.loader, loop.times
    ending: LoopEnd = "failed"  # Unless something else is found out.
    batches: Iterator[Any] = iter(())
    try:
        # A loader may draw when it starts to read. So the program's generators come
        # back behind that, if a replay ends here.
        batches = loop.read()
        job.continue_loop()
        running = loader.running_loop
        for batch in batches:
            # All samples of a global batch may be other replicas'. It has its boundary
            # here, too, since all have to count the same ones.
            if batch is not NOTHING:
                yield batch
            if loop.has_ended or job.loader is not loader:
                raise loop.overlap_error()

            # The body has done with this micro-batch. Only after the last one of a
            # global batch is there anything to count.
            part = running.current.part
            if not part.is_step:
                continue
            loop.index += part.advance
            if loop.start.inside:  # It belongs to the batch around it: no boundary.
                continue

            # The boundary. The position moves first: what is saved here goes on behind
            # this batch. Most jobs have nothing else to do before it.
            job.progress.index += part.advance
            for finish_batch in job.ends_of_batch:
                finish_batch(loader)
            job.boundary.reach()
            if times is not None:
                times.end_step(loop.start, part)
        ending = "over"
    except GeneratorExit:
        # At the interpreter's end there may be no `sys`, but the job has ended it.
        is_break = not loop.has_ended and is_left_by_break(sys._getframe().f_back)
        ending = "break" if is_break else "exception"
        raise
    finally:
        # An exception may keep this frame, and with it persistent workers; the garbage
        # collector takes 5 s to end each of them.
        del batches
        loop.end(ending)


def _codes(names: str) -> frozenset[int]:
    """Return the instructions of these names that this version of Python has."""
    return frozenset(dis.opmap[name] for name in names.split() if name in dis.opmap)


_POPPING = _codes("POP_TOP POP_ITER END_FOR POP_BLOCK")
_DROPPING = _codes(
    "DELETE_FAST DELETE_NAME DELETE_GLOBAL STORE_FAST STORE_NAME STORE_GLOBAL "
    "RETURN_VALUE RETURN_CONST"
)
_ITERATING = _codes("FOR_ITER SEND YIELD_FROM")
_CACHE = dis.opmap.get("CACHE")


def is_left_by_break(frame: FrameType | None) -> bool:
    """Return whether the `for` that closes its iterator from `frame` was left freely.

    Wrapping generators (tqdm, a logging generator) are closed where they stand, at
    their `yield` or in a `finally` around it; the frame that closes them decides.

    Args:
        frame: The frame below the generator that receives GeneratorExit; None when the
            interpreter ends and closes what a variable of a module still holds.
    """
    if frame is None:
        return False
    while frame is not None:
        opcode = _opcode_at(frame)
        if opcode in _POPPING or opcode in _DROPPING:
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return True


def is_called_by_for_loop(frame: FrameType) -> bool:
    """Return whether a generator is asked by a `for` (or `yield from`), not `next`."""
    return _opcode_at(frame) in _ITERATING


def _opcode_at(frame: FrameType) -> int:
    """Return the instruction at which a frame stands; -1 before its first.

    CPython 3.12 stands behind the caches of a FOR_ITER or SEND that it has specialized
    for generators, which happens when such a loop begins for the second time.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    while at >= 0 and code[at] == _CACHE:
        at -= 2
    return code[at] if at >= 0 else -1


def line_of(frame: FrameType) -> str:
    """Return where a program stands, as "file.py:line"; not in a bar of a package."""
    while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        file = frame.f_code.co_filename
        if is_of_program(file) and not is_of_package(file):
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
