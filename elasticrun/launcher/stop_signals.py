"""The signals that ask the launcher to stop, read as bytes in its loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
_SAME_SECONDS = 1.0


class StopSignals:
    """Tells a signal that means something from one that only repeats another.

    Whoever signals a process and its group, as timeout(1) does, sends two at once. When
    a terminal is closed, the shell and the kernel both send SIGHUP; a second one must
    not be taken for the impatience of somebody who is gone.

    Args:
        on_stop: Called with the name of the signal, and the exit code that it leads to.
    """

    def __init__(self, on_stop: Callable[[str, int], None]) -> None:
        self._on_stop = on_stop
        self._counted_at: dict[int, float] = {}

    def read(self, descriptor: int) -> None:
        """Take the signals whose numbers are there."""
        for number in os.read(descriptor, 4096):
            self.take(number, now=time.monotonic())

    def take(self, number: int, *, now: float) -> None:
        """Take one signal."""
        if number not in STOP_CODES:
            return
        before = self._counted_at.get(number)
        is_same = before is not None and now - before < _SAME_SECONDS
        is_late = number == signal.SIGHUP and bool(self._counted_at)
        if not is_same and not is_late:
            self._counted_at[number] = now
            self._on_stop(
                signal.Signals(number).name, STOP_CODES[signal.Signals(number)]
            )


@contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Have signals write their number into a pipe, whose reading end this yields."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A job that was started with `nohup` goes on when its terminal is closed.
    numbers = [n for n in STOP_CODES if signal.getsignal(n) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, _ignore)
    try:
        yield reader
    finally:
        # The job is over, and a signal must not change its code any more; Python's own
        # handlers would not last as long as the interpreter needs to end.
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let the byte in the pipe say it."""
