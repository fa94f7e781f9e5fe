"""SIGTERM and SIGINT as bytes in a pipe, which a thread reads while the program works.

A Python signal handler does not run while the main thread waits in C++ (a collective, a
full queue), but the byte that `signal.set_wakeup_fd` writes arrives at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}

_FLUSH_SECONDS = 1.0
_LOOK_FOR_PARENT_SECONDS = 1.0

_active: SignalPipe | None = None


class SignalPipe:
    """A pipe that wakes its reader, with a byte for each stop signal that arrives.

    `install` takes SIGTERM, and SIGINT unless the session is interactive (there it
    interrupts the cell as ever) or ignores it (as what a shell starts in its
    background does). A handler that the program had set runs as well.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._outer: SignalPipe | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on, for `select`."""
        return self._reader

    def install(self) -> None:
        """Take the stop signals, which Python allows in the main thread only."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "the job was started in another thread than the main one, so SIGTERM "
                "and SIGINT end it without saving; call elasticrun.init() in the main "
                "thread"
            )
            return
        self._outer, _active = _active, self
        self._previous_fd = signal.set_wakeup_fd(
            self._writer, warn_on_full_buffer=False
        )
        for number in EXIT_CODES:
            if number == signal.SIGINT and not _takes_interrupts():
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
            self._give_up_turn()
            return
        _active = self._outer
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._previous.clear()

    def _give_up_turn(self) -> None:
        """Leave the pipes that were installed one over another; it is not the last."""
        inner = _active
        while inner is not None and inner._outer is not self:
            inner = inner._outer
        if inner is not None:
            inner._outer = self._outer
            inner._previous, inner._previous_fd = self._previous, self._previous_fd

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Others give the wake-up descriptor back to nobody: asyncio when its loop ends.
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        if current != self._writer and _active is self:
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, bytes([number]))
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _takes_interrupts() -> bool:
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return not is_ignored and not hasattr(sys, "ps1")


def exit_at_once(code: int) -> None:
    """End this process now, without unwinding; what was printed still comes out.

    But for what nobody reads: a full pipe must not keep the process.
    """
    flushing = threading.Thread(target=_flush_output, daemon=True)
    try:
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
    except RuntimeError:  # From Python 3.12 on, no thread starts while it ends.
        _flush_output()
    os._exit(code)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


@contextlib.contextmanager
def stops_held_back() -> Iterator[None]:
    """Start processes within that stop signals cannot kill until they have a say.

    They inherit that this thread holds the signals back; a replica's other threads do
    not, so that it still hears of them. A forkserver has to be there before: it would
    hand this on to whatever else it starts.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def leave_stops_to_parent() -> None:
    """In a DataLoader worker: ignore stop signals, but for those that the parent sends.

    Ctrl-C and a scheduler's SIGTERM go to every process of a group. A worker that died
    of them would crash the replica before it reaches the boundary at which it saves. It
    ends with its parent, also when it stalls and the parent could not tell it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(
        target=_exit_when_told_by_parent, name="elasticrun-term", daemon=True
    ).start()


def _exit_when_told_by_parent() -> None:
    parent = multiprocessing.parent_process()  # With forkserver not `os.getppid()`.
    parent_pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    forked_by = os.getppid()
    while True:
        information = signal.sigtimedwait({signal.SIGTERM}, _LOOK_FOR_PARENT_SECONDS)
        is_told = information is not None and information.si_pid == parent_pid
        is_orphan = os.getppid() != forked_by or not _is_alive(parent)
        if is_told or is_orphan:
            os._exit(0)


def _is_alive(parent: Any) -> bool:
    return parent is None or bool(parent.is_alive())


# A forked child must not write its signals into the parent's pipe, nor before it could
# say so: they wait until it has.


def _hold_signals() -> None:
    if _active is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)


def _let_signals_go() -> None:
    mask = vars(_forking).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    while _active is not None:
        _active.uninstall()
    _let_signals_go()


_forking = threading.local()
_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(
        before=_hold_signals,
        after_in_parent=_let_signals_go,
        after_in_child=_forget_in_child,
    )
