"""SIGTERM and SIGINT as bytes in a pipe, which a thread reads while the program works.

A Python signal handler does not run while the main thread waits in C++ (a collective, a
full queue), but the byte that `signal.set_wakeup_fd` writes arrives at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}

_active: SignalPipe | None = None


class SignalPipe:
    """A pipe that wakes its reader, with a byte for each stop signal that arrives.

    `install` takes SIGTERM, and SIGINT unless the session is interactive (there it
    interrupts the cell as ever). A handler that the program had set runs as well.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    def fileno(self) -> int:
        """Return the descriptor to wait on, for `select`."""
        return self._reader

    def install(self) -> None:
        """Take the stop signals; does nothing outside the main thread, as Python asks."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            return
        _active = self
        self._previous_fd = signal.set_wakeup_fd(
            self._writer, warn_on_full_buffer=False
        )
        for number in EXIT_CODES:
            if number == signal.SIGINT and hasattr(sys, "ps1"):
                continue
            self._previous[number] = signal.signal(number, self._on_signal)

    def wake(self) -> None:
        """Let the reader's `select` return; a full pipe will wake it anyway."""
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return

    def read(self) -> list[int]:
        """Return the stop signals that came since the last call, without waiting."""
        try:
            data = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        return [number for number in data if number in EXIT_CODES]

    def close(self) -> None:
        """Give the signals back to whom they belonged, and close the pipe."""
        self.uninstall()
        os.close(self._reader)
        os.close(self._writer)

    def uninstall(self) -> None:
        """Give the signals back to whom they belonged."""
        global _active
        if _active is not self:
            return
        _active = None
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def exit_at_once(code: int) -> None:
    """End this process now, without unwinding; what was printed still comes out."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def leave_stops_to_parent() -> None:
    """In a DataLoader worker: ignore stop signals, but for those that the parent sends.

    Ctrl-C and a scheduler's SIGTERM go to every process of a group. A worker that died of
    them would crash the replica before it reaches the boundary at which it saves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()
    threading.Thread(
        target=_exit_when_told_by, args=(parent,), name="elasticrun-term", daemon=True
    ).start()


def _exit_when_told_by(parent: int) -> None:
    while True:
        information = signal.sigwaitinfo({signal.SIGTERM})
        if information.si_pid == parent or os.getppid() != parent:
            os._exit(0)


def _forget_in_child() -> None:
    """A forked child must not write its signals into the parent's pipe."""
    if _active is not None:
        _active.uninstall()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_in_child)
