"""Stop signals as bytes in a pipe, which a thread reads while the program runs.

A Python signal handler does not run while the main thread waits in C++ (a collective, a
full queue), but the byte that `signal.set_wakeup_fd` writes arrives at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from elasticrun.errors import BY_SIGNAL
from elasticrun.logger import Logger

logger = Logger(__name__)

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ALWAYS = (signal.SIGTERM, signal.SIGINT)
# What says that an end is to come. Another signal after it is that end, not somebody's
# impatience; and these are sent twice, as when a terminal is closed.
ANNOUNCING = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

REPEAT_SECONDS = 1.0  # Of one signal that is sent to a process and to its group.
_LOOK_FOR_PARENT_SECONDS = 1.0

_active: SignalPipe | None = None


def parse_stop_signals(text: str, *, setting: str) -> tuple[int, ...]:
    """Return the signals that mean to save and stop, from a list as `TERM,USR1`.

    Args:
        setting: What to call it in an error.
    """
    chosen = dict.fromkeys(_ALWAYS)
    possible = {number.name: number for number in BY_SIGNAL}
    for word in text.split(","):
        number = possible.get("SIG" + word.strip().upper().removeprefix("SIG"))
        if number is None:
            names = ", ".join(name.removeprefix("SIG") for name in possible)
            raise ValueError(
                f"{setting} is {text!r}, but {word.strip()!r} is no signal that can "
                f"mean to save and stop. Those are {names}; TERM and INT always do."
            )
        chosen[number] = None
    return tuple(chosen)


def means_exit_now(number: int, *, before: int) -> bool:
    """Return whether a stop signal after another one means to end at once."""
    return number not in ANNOUNCING and before not in ANNOUNCING


class SignalPipe:
    """A pipe that wakes its reader, with a byte for each stop signal that arrives.

    `install` takes SIGTERM, and SIGINT unless the session is interactive (there it
    interrupts the cell as ever) or ignores it (as what a shell starts in its
    background does). A handler that the program had set runs as well. It takes another
    signal only as long as nobody else does: a program's own handler keeps it, and it
    stays ignored where it is.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._outer: SignalPipe | None = None

    def fileno(self) -> int:
        return self._reader

    def install(self) -> None:
        """Handle the stop signals, which Python allows in the main thread only."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "the job was started in another thread than the main one, so stop "
                "signals end it without saving; call elasticrun.init() in the main "
                "thread"
            )
            return
        self._outer, _active = _active, self
        self._previous_fd = signal.set_wakeup_fd(
            self._writer, warn_on_full_buffer=False
        )
        caught = _caught_signals()
        for number in self._numbers:
            if number == signal.SIGINT and not _takes_interrupts():
                continue
            if number not in _ALWAYS and not _is_free(number, caught):
                continue
            self._previous[number] = signal.signal(number, self._on_signal)

    def wake(self) -> None:
        """Let the reader's `select` return; a full pipe will wake it anyway."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def read(self) -> list[int]:
        """Return the stop signals that came since the last call, without waiting."""
        try:
            data = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        return [number for number in data if number and self._means_stop(number)]

    def _means_stop(self, number: int) -> bool:
        """Return whether a signal is to stop the job: the program may have taken it."""
        is_ours = signal.getsignal(number) == self._on_signal
        return number in self._numbers and (number in _ALWAYS or is_ours)

    def close(self) -> None:
        self.uninstall()
        os.close(self._reader)
        os.close(self._writer)

    def uninstall(self) -> None:
        """Give the signals back to whom they belonged."""
        global _active
        if _active is not self:
            self._leave_chain()
            return
        _active = self._outer
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._previous.clear()

    def _leave_chain(self) -> None:
        """Take this pipe out of the chain of pipes, of which it is not the last.

        The one that was installed next gives the signals back to whoever had them
        before this one.
        """
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


def handled_stop_signals() -> frozenset[int]:
    """Return the stop signals that this process's job handles now."""
    return frozenset() if _active is None else frozenset(_active._previous)


def take_no_more_stop_signals() -> None:
    """Let stop signals do nothing from now on, but for a program's own handlers.

    For a replica whose program is at its end: its launcher hears of them as well, and
    one that died while it ends would seem to have crashed.
    """
    for number in BY_SIGNAL:
        handler = signal.getsignal(number)
        is_ours = isinstance(getattr(handler, "__self__", None), SignalPipe)
        if is_ours or handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _do_nothing)  # What it starts does not inherit this.


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal."""


def _is_free(number: int, caught: int) -> bool:
    """Return whether a signal does what it does by default.

    Another pipe gives way. Of handlers in C, such as faulthandler's, Python does not
    know.
    """
    handler = signal.getsignal(number)
    if isinstance(getattr(handler, "__self__", None), SignalPipe):
        return True
    return handler == signal.SIG_DFL and not caught >> (number - 1) & 1


def _caught_signals() -> int:
    """Return the set of signals that have a handler, as bits; 0 where it is unknown."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0


def _takes_interrupts() -> bool:
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return not is_ignored and not hasattr(sys, "ps1")


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block stop signals in processes that are started within.

    They inherit that this thread holds the signals back; a replica's other threads do
    not, so that it still hears of them. The forkserver of multiprocessing has to be
    there before: it would hand this on to whatever else it starts.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BY_SIGNAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unblock_stop_signals() -> None:
    """Unblock stop signals in a process that was started with them blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BY_SIGNAL)


def ignore_stop_signals_in_worker(numbers: Collection[int] = STOP_SIGNALS) -> None:
    """In a DataLoader worker: ignore stop signals, but for those that the parent sends.

    Ctrl-C and a scheduler's SIGTERM go to every process of a group. A worker that died
    of them would crash the replica before it reaches the boundary at which it saves. It
    ends with its parent, also when it stalls and the parent could not tell it.
    """
    for number in {signal.SIGINT, *numbers} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(BY_SIGNAL) - {signal.SIGTERM})
    threading.Thread(
        target=_exit_when_told_by_parent, name="elasticrun-term", daemon=True
    ).start()


def _exit_when_told_by_parent() -> None:
    from multiprocessing import parent_process  # The launcher never comes here.

    parent = parent_process()  # With forkserver not `os.getppid()`.
    parent_pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    forked_by = os.getppid()
    while True:
        information = signal.sigtimedwait({signal.SIGTERM}, _LOOK_FOR_PARENT_SECONDS)
        is_told = information is not None and information.si_pid == parent_pid
        has_parent = parent is None or parent.is_alive()
        if is_told or os.getppid() != forked_by or not has_parent:
            os._exit(0)


# A forked child must not write its signals into the parent's pipe, nor before it could
# say so: they wait until it has.


def _hold_signals() -> None:
    if _active is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, BY_SIGNAL)


def _let_signals_go() -> None:
    mask = vars(_forking).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    while _active is not None:
        _active.uninstall()
    _let_signals_go()


_forking = threading.local()
os.register_at_fork(
    before=_hold_signals,
    after_in_parent=_let_signals_go,
    after_in_child=_forget_in_child,
)
