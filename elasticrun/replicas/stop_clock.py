"""Ends a replica whose stop takes too long, or that waits for a dead one."""

from __future__ import annotations

import faulthandler
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable

from elasticrun.errors import BY_SIGNAL
from elasticrun.logger import Logger
from elasticrun.replicas.process_end import exit_at_once
from elasticrun.replicas.signals import ANNOUNCING, REPEAT_SECONDS, means_exit_now

logger = Logger(__name__)

NAMING_SECONDS = 2.0  # For an agreement that fails to say first who was silent.


class StopClock:
    """Ends this process when a stop that a signal asked for takes too long.

    Args:
        grace: Seconds that it may take.
        describe: Says where the program is, for the message.

    Attributes:
        deadline: When the process ends without a checkpoint, or None.
        warns_at: When it says that it is still waiting, or None.
    """

    def __init__(self, grace: float, describe: Callable[[], str]) -> None:
        self._grace = grace
        self._describe = describe
        self._first_signal: tuple[int, float] | None = None  # And when it came.
        self._has_heard = True  # Of rank 0, since that signal.
        self.deadline: float | None = None
        self.warns_at: float | None = None

    def on_signal(self, number: int) -> bool:
        """Return whether this is the first signal; another one ends the process.

        The same one within a moment counts once: a terminal and a launcher may both
        send it.
        """
        now = time.monotonic()
        if self._first_signal is not None:
            first, when = self._first_signal
            is_other = number != first or now - when > REPEAT_SECONDS
            if is_other and means_exit_now(number, before=first):
                exit_at_once(BY_SIGNAL[signal.Signals(number)])
            if is_other and means_exit_now(number, before=number):
                self._first_signal = (number, now)
            return False
        self._first_signal = (number, now)
        self._has_heard = False
        self.deadline = now + self._grace + NAMING_SECONDS
        self.warns_at = now + self._grace / 2
        hint = "" if number in ANNOUNCING else " (a second one exits at once)"
        name = signal.Signals(number).name
        logger.info("%s: stopping at the next boundary%s", name, hint)
        return True

    def on_stopping(self) -> None:
        """The boundary has come; what is saved there may take its time."""
        self.deadline = self.warns_at = None

    def on_heard(self) -> None:
        self._has_heard = True

    def on_decided(self) -> None:
        """A stop that a signal asked for is agreed; the boundary is to come soon."""
        deadline = time.monotonic() + self._grace
        self.deadline = min(deadline, self.deadline or deadline)

    def on_time(self, now: float) -> None:
        """End the process if it is time, and warn before that."""
        if self.warns_at is not None and now >= self.warns_at:
            self.warns_at = None
            logger.warning(
                "half of the %g s are over that a stop may take (ELASTICRUN_GRACE), "
                "and no boundary has come; the program is %s",
                self._grace,
                self._describe(),
            )
        if self.deadline is None or now < self.deadline:
            return
        number, _ = self._first_signal or (signal.SIGTERM, 0.0)
        tell = functools.partial(self._tell_where, number)
        _exit_telling(tell, BY_SIGNAL[signal.Signals(number)])

    def exit_stuck(self, why: str, seconds: float) -> None:
        """End this process, which waits for a replica that is gone."""
        _exit_telling(functools.partial(self._tell_stuck, why, seconds), 1)

    def _tell_stuck(self, why: str, seconds: float) -> None:
        logger.error(
            "%s No boundary came within %g s of that (the program is %s): likely a "
            "collective of the GPU waits for that replica, as it would for minutes. "
            "Exiting. The stacks:",
            why,
            seconds,
            self._describe(),
        )
        _print_stacks()

    def _tell_where(self, number: int) -> None:
        logger.error(
            "%s within %g s of %s (the program is %s): exiting without a new "
            "checkpoint. ELASTICRUN_GRACE sets the seconds. The stacks:",
            "no boundary came" if self._has_heard else "rank 0 never answered",
            self._grace,
            signal.Signals(number).name,
            self._describe(),
        )
        _print_stacks()


def _exit_telling(tell: Callable[[], None], exit_code: int) -> None:
    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(NAMING_SECONDS)  # Nobody may read what is written.
    exit_at_once(exit_code)


def _print_stacks() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
        faulthandler.dump_traceback()
