"""Mail between the watchers, through the job's store."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from elasticrun.control.store import JobStore
from elasticrun.errors import AgreementError

Message = dict[str, Any]

_FOREVER = timedelta(days=20)  # A wait that times out makes the client print warnings.
_LAST = ("lost", "end", "farewell")  # Nothing comes after a message of these types.


class Mail:
    """One replica's inbox, and the way into the others'.

    Mail is fetched by one thread and sent by another, which wait in C++: for ever, when
    rank 0 is stopped, so that whoever uses this is never kept waiting itself.

    Args:
        store: The job's store, or None when there is one replica.
        wake: Called when the inbox has something new.
    """

    def __init__(
        self, store: JobStore | None, rank: int, *, wake: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._wake = wake
        self._is_connected = store is not None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[int, Message] | None]
        self._outbox = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if store is not None:
            mailbox = Mailbox(store.connect(), rank)
            client = store.connect()
            self._threads = [
                threading.Thread(
                    target=self._fetch, args=(mailbox,), name="elasticrun-mail"
                ),
                threading.Thread(
                    target=self._deliver, args=(client,), name="elasticrun-post"
                ),
            ]

    def start(self) -> None:
        """Start to fetch and send."""
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def received(self) -> Iterator[Message]:
        """Yield what is in the inbox, without waiting."""
        while not self._inbox.empty():
            yield self._inbox.get()

    def put(self, message: Message) -> None:
        """Put a message into the own inbox; from any thread."""
        self._inbox.put(message)
        self._wake()

    def send(self, rank: int, message: Message) -> None:
        """Send a message; it is dropped once there is no store any more."""
        if rank == self._rank and (rank == 0 or not self._is_connected):
            self.put(message)  # Wakes: it may be a deadline that sends it.
        elif self._is_connected:
            self._outbox.put((rank, message))

    def disconnect(self) -> None:
        """Note that rank 0, and the store with it, has gone or is about to."""
        self._is_connected = False

    def end(self) -> None:
        """Let the inbox end with a message of type "end", and the fetching with it."""
        self._inbox.put({"type": "end"})
        if self._is_connected:
            self._outbox.put((self._rank, {"type": "end"}))

    def stop_sending(self) -> None:
        """Let the sending thread end once it has sent everything."""
        self._outbox.put(None)

    def join(self, *, deadline: float) -> bool:
        """Wait for the threads; return whether they have ended by `deadline`."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _fetch(self, mailbox: Mailbox) -> None:
        while True:
            try:
                message = mailbox.receive()
            except ConnectionError as error:
                message = {"type": "lost", "reason": str(error)}
            self.put(message)
            if message["type"] in _LAST:
                return

    def _deliver(self, client: TCPStore) -> None:
        while (letter := self._outbox.get()) is not None:
            try:
                send(client, *letter)
            except ConnectionError as error:
                self.put({"type": "lost", "reason": str(error)})
                return


class Mailbox:
    """Messages to one rank, read in the order in which they were sent."""

    def __init__(self, client: TCPStore, rank: int) -> None:
        self._client = client
        self._rank = rank
        self._number = 0

    def receive(self) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            ConnectionError: The store is gone, and with it rank 0.
        """
        key = f"mail/{self._rank}/{self._number + 1}"
        try:
            self._client.wait([key], _FOREVER)
            message = json.loads(self._client.get(key))
            self._client.delete_key(key)
        except dist.DistError as error:
            raise ConnectionError(f"the job's store is gone: {error}") from error
        self._number += 1
        if not isinstance(message, dict):
            raise AgreementError(f"{key} holds {message!r}, which is no message.")
        return message


def send(client: TCPStore, rank: int, message: dict[str, Any]) -> None:
    """Put a message into the mailbox of `rank`.

    Raises:
        ConnectionError: The store is gone, and with it rank 0.
    """
    try:
        number = client.add(f"mail/{rank}", 1)
        client.set(f"mail/{rank}/{number}", json.dumps(message))
    except dist.DistError as error:
        raise ConnectionError(f"the job's store is gone: {error}") from error
