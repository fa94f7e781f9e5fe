"""A watcher's inbox, and the way into the others'."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator

from elasticrun.replicas.links import Links
from elasticrun.replicas.messages import decode, encode


class Mail:
    """Messages of this replica's threads and of other replicas' watchers.

    Only the watcher's thread may use it, but for `put`.

    Args:
        links: The connections to other replicas, or None when there is one replica.
        wake: Called when the inbox has something new.
    """

    def __init__(
        self, links: Links | None, rank: int, *, wake: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._links = links
        self._wake = wake
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    @property
    def links(self) -> Links | None:
        """The connections, as long as they stand."""
        return self._links

    def put(self, message: object) -> None:
        """Put a message into the own inbox; from any thread."""
        self._inbox.put(message)
        self._wake()

    def received(self) -> Iterator[object]:
        """Yield what has come, without waiting."""
        while not self._inbox.empty():
            yield self._inbox.get()
        if self._links is not None:
            yield from map(decode, self._links.read())

    def send(self, rank: int, message: object) -> None:
        """Send a message, without waiting; it is dropped if nobody is there."""
        self.broadcast((rank,), message)

    def broadcast(self, ranks: Collection[int], message: object) -> None:
        """Send a message to several, as `send` does to one."""
        if self._rank in ranks:
            self.put(message)  # Wakes: it may be a deadline that sends it.
        others = [rank for rank in ranks if rank != self._rank]
        if others and self._links is not None:
            self._links.send(others, encode(message))

    def disconnect(self, *, timeout: float = 0.0) -> None:
        """Hang up, once everything was sent or `timeout` seconds are over."""
        if self._links is not None:
            self._links.close(timeout=timeout)
            self._links = None
