"""How one rank's part in a save reaches the other ranks."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from elasticrun.control.store import JobStore

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # Between two looks into the store.


class Channel(NamedTuple):
    """How a save reaches the other ranks, and how long it waits for them.

    Attributes:
        store: The job's, with a client that nobody else uses now; None without others.
        timeout: Seconds.
        given_up: Set when nobody is to wait any more. With it, waiting is looking now
            and then: a thread must not be in the store's C++ when the interpreter ends.
    """

    store: JobStore | None
    timeout: float
    given_up: threading.Event | None = None

    def put(self, key: str, value: Any) -> None:
        """Tell the others, if there are any."""
        if self.store is not None:
            self.store.put(key, value)

    def take(self, key: str, *, deadline: float) -> Any:
        """Wait for what another rank tells.

        Raises:
            TimeoutError: It did not by the deadline, or nobody is to wait any more.
            ConnectionError: The store is gone, and with it rank 0.
        """
        assert self.store is not None
        if self.given_up is None:
            left = deadline - time.monotonic()
            return self.store.take(key, timeout=max(left, 0.001))
        pause = _SHORTEST_PAUSE
        while (value := self.store.find(key)) is None:
            if self.given_up.wait(pause) or time.monotonic() > deadline:
                raise TimeoutError(f"no {key}")
            pause = min(2 * pause, _LONGEST_PAUSE)
        return value
