"""Notices that a program asks for batches before it trains with those it has."""

from __future__ import annotations

import sys
import threading

from elasticrun.data.order.plan import RunningLoop
from elasticrun.errors import ElasticRunError, warn_at_program
from elasticrun.job import open_loop
from elasticrun.job.loop import Loop

_ADVICE = (
    "Train with each batch before you ask for the next one. The loader reads ahead "
    'itself: with num_workers=, pin_memory=True, device="cuda".'
)


class ReadAhead:
    """Looks at where forward passes for training come: a loop, and its last batch.

    A prefetcher takes one batch before the first forward pass, and hands the last one
    out behind the loop. In between each batch has a forward pass, of the one before.
    """

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._is_late = False  # The first forward pass came behind the first batch.
        self._last = self._num_batches = 0  # Global batches that had one.

    def on_forward(self, loop: Loop | None) -> None:
        """Note a forward pass for training in a loop's body; None: outside of any."""
        before = self._loop
        if loop is not before:
            self._loop = loop
            if isinstance(loop, RunningLoop):
                current = loop.current
                self._is_late = current.number > loop.begin or current.part.micro > 0
                self._last, self._num_batches = -1, 0
            elif loop is None and isinstance(before, RunningLoop) and self._is_late:
                _look_at(before, self._num_batches)
        if isinstance(loop, RunningLoop) and loop.thread != threading.get_ident():
            _check_thread(loop, is_late=self._is_late)
        if loop is not None and loop.current.number != self._last:
            self._last = loop.current.number
            self._num_batches += 1


def _look_at(loop: RunningLoop, num_batches: int) -> None:
    """Warn if all batches of a loop that has ended had a forward pass but the first."""
    if num_batches >= loop.current.number - loop.begin:
        warn_at_program(
            f"a forward pass for training came behind the loop ({loop.where}) whose "
            "first batch had none: its batches are asked for one ahead, as by a "
            "prefetcher. A batch counts as trained once the next one is asked for, so "
            f"each stop loses one. {_ADVICE}"
        )


def _check_thread(loop: RunningLoop, *, is_late: bool) -> None:
    """Refuse a loop in a thread of its own, not one whose body waits for the forward.

    That one asks for no batch meanwhile. A prefetcher does, or has done so before.
    """
    frame = sys._current_frames().get(loop.thread)
    while frame is not None and frame.f_code.co_filename != open_loop.__file__:
        frame = frame.f_back
    is_ahead = is_late and loop.thread != threading.main_thread().ident
    if frame is not None or is_ahead:
        raise ElasticRunError(
            f"the loop ({loop.where}) runs in another thread than the training, so "
            "batches are asked for before earlier ones are trained with. A stop would "
            f"lose these, and end only that thread. {_ADVICE}"
        )
