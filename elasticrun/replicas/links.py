"""A connection between rank 0 and each other replica, for their watchers' messages.

A process that is killed can tell nobody, but its connection is closed for it, so rank 0
learns of a death at once; of a machine that is gone, it learns within a minute from
TCP's keep-alive. Once they stand, nothing here ever waits: what cannot be sent now is
sent when the connection takes it.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Iterable

from elasticrun.errors import AgreementError
from elasticrun.logger import Logger
from elasticrun.replicas.store import HUB, START_TIMEOUT, Address, JobStore
from elasticrun.replicas.wire import Channel, Message, WireError, to_line

logger = Logger(__name__)

_BACKLOG = 1024
_MAX_BYTES = 1 << 16
_HELLO_SECONDS = 5.0  # That a caller has to show that it is a replica.
# Seconds before the first probe of a silent connection, between probes, and how many
# may stay unanswered.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class Links:
    """One replica's connections: rank 0's to all others, another one's to rank 0.

    `fileno` is for `poll`: when it becomes readable, there is something to do in
    `read`.

    Args:
        channels: By the rank at the other end.
    """

    def __init__(self, channels: dict[int, Channel]) -> None:
        self._channels = channels
        self._unsent: set[int] = set()  # The ranks that are watched for room to send.
        self._selector = selectors.DefaultSelector()
        for rank, channel in channels.items():
            _prepare(channel.connection)
            self._selector.register(channel.connection, selectors.EVENT_READ, rank)
        _held.add(self)

    def fileno(self) -> int:
        return self._selector.fileno()

    def read(self) -> list[Message]:
        """Return the messages that have come, without waiting; send what was left.

        The last one from a rank that is gone is {"type": "HungUp", "rank": rank}.
        """
        messages: list[Message] = []
        for key, events in self._selector.select(0):
            rank: int = key.data
            if events & selectors.EVENT_WRITE:
                self._channels[rank].flush()
                self._watch(rank)
            if events & selectors.EVENT_READ:
                messages += self._read(rank)
        return messages

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message, without waiting; a rank that is gone gets nothing."""
        line = to_line(message)
        for rank in ranks:
            if rank in self._channels:
                self._channels[rank].send_line(line)
                self._watch(rank)

    def close(self, *, timeout: float = 0.0) -> None:
        """Send what is left, for `timeout` seconds at most, and hang up."""
        deadline = time.monotonic() + timeout
        for channel in self._channels.values():
            channel.flush_until(deadline)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptors; in a fork, the replica's stay open."""
        for channel in self._channels.values():
            channel.close()
        self._selector.close()
        self._channels.clear()

    def _read(self, rank: int) -> list[Message]:
        channel = self._channels[rank]
        try:
            messages = channel.receive()
        except WireError:
            channel.is_open, messages = False, []
        if not channel.is_open:
            self._unsent.discard(rank)
            self._selector.unregister(channel.connection)
            channel.close()
            del self._channels[rank]
            messages.append({"type": "HungUp", "rank": rank})
        return messages

    def _watch(self, rank: int) -> None:
        """Have `read` send what is left, and only as long as something is."""
        channel = self._channels[rank]
        if channel.has_unsent == (rank in self._unsent):
            return  # As nearly always, of thousands of replicas.
        self._unsent ^= {rank}
        events = selectors.EVENT_READ
        if channel.has_unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(channel.connection, events, rank)


def connect_all(
    store: JobStore, *, rank: int, world_size: int, timeout: float = START_TIMEOUT
) -> Links:
    """Return this replica's links, once every other rank is linked to rank 0.

    Collective.
    """
    if rank == 0:
        return Links(_accept_all(store, world_size, timeout=timeout))
    there = store.take(HUB)
    address = Address.parse(there["address"])
    connection = socket.create_connection(
        (address.host, address.port), timeout=START_TIMEOUT
    )
    channel = Channel(connection, limit=_MAX_BYTES)
    channel.send({"token": there["token"], "rank": rank})
    return Links({0: channel})


def _accept_all(
    store: JobStore, world_size: int, *, timeout: float
) -> dict[int, Channel]:
    """Listen until every other rank has called, and no longer."""
    token = secrets.token_hex(16)
    deadline = time.monotonic() + timeout
    channels: dict[int, Channel] = {}
    missing = set(range(1, world_size))
    with socket.create_server((store.interface, 0), backlog=_BACKLOG) as listener:
        address = Address(store.address.host, listener.getsockname()[1])
        store.put(HUB, {"address": str(address), "token": token})
        while missing:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                raise AgreementError(
                    f"rank {', '.join(map(str, sorted(missing)))} of {world_size} did "
                    f"not connect to rank 0 at {address} within {timeout:g} s. Look at "
                    "their logs: they may have died, or cannot reach that address."
                ) from error
            channel = Channel(connection, limit=_MAX_BYTES)
            rank = _rank_of(channel, token)
            if rank in missing:
                missing.remove(rank)
                channels[rank] = channel
            else:
                logger.warning("rank 0 hung up on a caller that is no replica")
                channel.close()
    return channels


def _rank_of(channel: Channel, token: str) -> int:
    """Return the rank of a caller, or -1 if it does not know the token.

    It says nothing more until rank 0, for whose decisions it waits, has heard all.
    """
    channel.connection.settimeout(_HELLO_SECONDS)
    try:
        hello = channel.receive_one() or {}
    except WireError:
        return -1
    told, rank = hello.get("token"), hello.get("rank")
    if not isinstance(told, str) or not isinstance(rank, int):
        return -1
    return rank if secrets.compare_digest(told.encode(), token.encode()) else -1


def _prepare(connection: socket.socket) -> None:
    """Make a connection non-blocking, with keep-alive probes."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for setting, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, setting, value)


# A forked child, such as a DataLoader worker, may outlive its replica: it must not hold
# the connection that says that the replica lives.

_held: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_held):
        each.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
