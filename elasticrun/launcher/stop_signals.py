"""Signals that ask the launcher to stop, read as bytes in its event loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from elasticrun.errors import BY_SIGNAL
from elasticrun.replicas.signals import REPEAT_SECONDS, STOP_SIGNALS, means_exit_now


class StopSignals:
    """Filters stop signals: one that only repeats another is ignored.

    Whoever signals a process and its group, as timeout(1) does, sends two at once. When
    a terminal is closed, the shell and the kernel both send SIGHUP; a second one must
    not be taken for the impatience of somebody who is gone. Nor must what a scheduler
    sends when the time is over of which it has warned.

    The end of the process that started this one is such an announcement, too: where a
    signal goes to every process of a step, a service or a container, it comes with it.

    Args:
        on_stop: Called with the name of the signal, and the exit code that it leads to.
    """

    def __init__(
        self,
        on_stop: Callable[[str, int], None],
        numbers: Collection[int] = STOP_SIGNALS,
    ) -> None:
        self._on_stop = on_stop
        self._numbers = numbers
        self._counted_at: dict[int, float] = {}

    def read(self, descriptor: int) -> None:
        for number in os.read(descriptor, 4096):
            self.take(number, now=time.monotonic())

    def take(self, number: int, *, now: float) -> None:
        if number in self._numbers:
            name = signal.Signals(number).name
            self._take(number, name, BY_SIGNAL[signal.Signals(number)], now=now)

    def take_end_of_parent(self, *, now: float) -> None:
        """Stop because the process that started the launcher has ended."""
        cause = "the end of the process that started it"
        self.announce(cause, BY_SIGNAL[signal.SIGTERM], now=now)

    def announce(self, cause: str, code: int, *, now: float) -> None:
        """Stop for what only announces an end, so that no signal after it hurries."""
        self._take(signal.SIGHUP, cause, code, now=now)

    def _take(self, number: int, cause: str, code: int, *, now: float) -> None:
        last = self._counted_at.get(number)
        is_same = last is not None and now - last < REPEAT_SECONDS
        is_first = not self._counted_at
        means_more = any(means_exit_now(number, before=n) for n in self._counted_at)
        self._counted_at.setdefault(number, now)
        if is_first or (means_more and not is_same):
            self._counted_at[number] = now
            self._on_stop(cause, code)


@contextmanager
def signals_as_bytes(stops: Collection[int] = STOP_SIGNALS) -> Iterator[int]:
    """Have signals write their number into a pipe, whose reading end this yields."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A job that was started with `nohup` goes on when its terminal is closed.
    numbers = [n for n in stops if signal.getsignal(n) is not signal.SIG_IGN]
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
    """Do nothing: the byte in the pipe is read by the loop."""
