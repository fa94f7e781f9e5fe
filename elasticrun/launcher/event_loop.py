"""An event loop: calls back when a descriptor is readable, or a time has come."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Any

Callback = Callable[[], None]


class Timer:
    """Something that is to happen later, unless it is cancelled."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        """Let it happen now, and not again."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class EventLoop:
    """Calls back from `run_once`, one callback after another, all in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def watch(self, source: Any, callback: Callback) -> None:
        """Call back whenever `source` (it has a `fileno`) is readable."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: Any) -> None:
        """Take a `watch` back; call it before `source` is closed."""
        self._selector.unregister(source)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        """Call back once after so many seconds."""
        timer = Timer(callback)
        when = time.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_once(self) -> None:
        """Wait for the next event, and call back for all that have come."""
        timeout = None
        if self._timers:
            timeout = max(0.0, self._timers[0][0] - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # A callback before this one may have taken it back.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].fire()
