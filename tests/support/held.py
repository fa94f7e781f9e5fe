"""Holds the thread that writes a checkpoint at its first fsync, until it may go on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from tests.support.stage import DEADLINE, wait_until

WRITER = "elasticrun-writer"


class Held:
    """The writer's way to the disk.

    Attributes:
        error: What the disk says, if it is not to work.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_there = threading.Event()
        self._may_go_on = threading.Event()

    def pass_writer(self, descriptor: int, fsync: Callable[[int], None]) -> None:
        if threading.current_thread().name == WRITER:
            self._is_there.set()
            assert self._may_go_on.wait(DEADLINE)
            if self.error is not None:
                raise self.error
        fsync(descriptor)

    def wait_for_writer(self) -> None:
        assert self._is_there.wait(DEADLINE)

    def let_go(self) -> None:
        self._may_go_on.set()

    def hold_again(self) -> None:
        self._is_there.clear()
        self._may_go_on.clear()

    def let_go_when_awaited(self) -> threading.Thread:
        """Let the writer go once this thread waits for it."""
        waiting = threading.get_ident()

        def watch() -> None:
            wait_until(lambda: is_in_wait(waiting), "the wait for the writer")
            self.let_go()

        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher


def is_in_wait(thread: int) -> bool:
    """Return whether a thread waits for a flight to end."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "wait" and "saver.py" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def held_writer() -> Iterator[Held]:
    """Hold every write in flight until it is let go; at the end everything is."""
    held = Held()
    original = os.fsync
    with mock.patch.object(
        os, "fsync", lambda descriptor: held.pass_writer(descriptor, original)
    ):
        try:
            yield held
        finally:
            held.let_go()
