"""Waits for the GPU at certain points, so that a rescue knows what it has done.

When a replica dies, an NCCL collective waits for it on the GPU, while the program goes
on and launches more work behind it: a step, with gradients that were never averaged. As
soon as the collective is aborted, the GPU does that work with whatever is in memory. So
with rescues on GPUs, the program waits at each reduction of gradients and before each
step until the GPU is done, or a replica is known to have died. Then the program ends,
and only then are collectives aborted: what the GPU has done before is known.

What that costs is no more than the time from there to the boundary: until new work has
been launched, the GPU has none. It is measured at first, and a rescue is left out where
it is more than a hundredth of a step.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable

import torch
from torch.compiler import is_compiling

from elasticrun.checkpoint.states.state import CannotRescueError

_PASSING_SECONDS = 1.0  # For work before a boundary that waits for nobody.
_ABORT_SECONDS = 10.0
_LOOK_SECONDS = 0.002
_MOST_IDLE = 0.01  # Of a step.
_NUM_WARM_UP = 20
_NUM_MEASURED = 50


class Mark:
    """A place in the work of the current stream.

    Attributes:
        was_passed: Whether the GPU had come past it before collectives were aborted.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()
        self.was_passed = False

    def is_passed(self) -> bool:
        """Return whether the GPU has come past it."""
        return bool(self._event.query())

    def look(self, deadline: float) -> None:
        """Wait until the GPU has come past it; not after `deadline`."""
        while not self.was_passed:
            self.was_passed = self.is_passed()
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)


class GpuWork:
    """Waits for the GPU, but for no replica that has died.

    Args:
        check: Raises an error if another replica has died.
        abort: Ends all collectives that wait.

    Attributes:
        idle: Seconds in which the GPU may have had no work, up to the last boundary.
    """

    def __init__(self, check: Callable[[], None], abort: Callable[[], None]) -> None:
        self._check = check
        self._abort = abort
        self._is_captured = False
        self._done_at: float | None = None  # Since the last boundary.
        self._boundary_at = 0.0
        self._measured: list[tuple[float, float]] = []  # Seconds idle, and of the step.
        self.idle = 0.0

    def wait(self) -> None:
        """Wait until the GPU has done all that the current stream was told."""
        if is_compiling() or torch.cuda.is_current_stream_capturing():
            self._is_captured = True
            return
        begun, mark = time.perf_counter(), Mark()
        while not mark.is_passed():
            self._check()
            time.sleep(0)  # Other threads may run.
        now = time.perf_counter()
        # What a later wait takes costs nothing: then the GPU has work.
        self._done_at = now if self._done_at is None else self._done_at + now - begun

    def pass_boundary(self) -> bool:
        """Measure what waiting costs; return, once, whether that is too much."""
        now, done_at, self._done_at = time.perf_counter(), self._done_at, None
        self.idle = 0.0 if done_at is None else now - done_at
        if len(self._measured) == _NUM_WARM_UP + _NUM_MEASURED:
            return False
        self._measured.append((self.idle, now - self._boundary_at))
        self._boundary_at = now
        if len(self._measured) < _NUM_WARM_UP + _NUM_MEASURED:
            return False
        measured = zip(*self._measured[_NUM_WARM_UP:], strict=True)
        idle, step = map(statistics.median, measured)
        return bool(idle > _MOST_IDLE * step)

    def mark(self) -> Mark:
        """Return where the current stream is.

        Raises:
            CannotRescueError: A step was compiled, or captured in a CUDA graph: what
                is replayed does not wait.
        """
        if self._is_captured:
            raise CannotRescueError("a step is compiled, or in a CUDA graph")
        return Mark()

    def end(self, marks: Iterable[Mark]) -> None:
        """Look which marks were passed, abort collectives, and wait for the rest.

        Raises:
            CannotRescueError: They could not be aborted.
        """
        deadline = time.monotonic() + _PASSING_SECONDS
        for mark in marks:
            mark.look(deadline)
        thread = threading.Thread(target=self._abort, daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            raise CannotRescueError("collectives of the GPU could not be aborted")
        torch.cuda.synchronize()
