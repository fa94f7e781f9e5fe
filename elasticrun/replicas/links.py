"""A connection between rank 0 and each other replica, for their watchers' messages.

A process that is killed can tell nobody, but its connection is closed for it, so rank 0
learns of a death at once; of a machine that is gone, it learns within a minute from
TCP's keep-alive. Nothing here ever waits: what cannot be sent now is sent when the
connection takes it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Iterable
from typing import TypeAlias

from elasticrun.replicas.store import HUB, START_TIMEOUT, Address, JobStore
from elasticrun.replicas.wire import Channel, Message, WireError, to_line

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_BYTES = 1 << 16
_PATIENCE = 30.0  # Seconds that a caller has to show that it is a replica.
# Seconds before the first probe of a silent connection, between probes, and how many
# may stay unanswered.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 20,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}


class Hub:
    """Rank 0's connections to all others.

    `fileno` is for `poll`: when it becomes readable, there is something to do in
    `read`.
    """

    def __init__(self, store: JobStore) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((store.interface, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._channels: dict[int, Channel] = {}
        self._ranks: dict[Channel, int] = {}
        self._unsent: set[Channel] = set()  # Those watched for room to send.
        # What is to be sent to ranks that have not called yet.
        self._early: dict[int, list[bytes]] = {}
        self._gone: set[int] = set()  # Ranks that have hung up, and get nothing more.
        # Callers that have not said who they are, and when they called.
        self._strangers: dict[Channel, float] = {}
        self._is_full = False
        self._has_been_full = False
        address = Address(store.address.host, self._listener.getsockname()[1])
        store.put(HUB, {"address": str(address), "token": self._token})
        _held.add(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._selector.fileno()

    def read(self) -> list[Message]:
        """Return the messages that have come, without waiting; send what was left.

        The last one from a rank that is gone is {"type": "hung_up", "rank": rank}.
        """
        messages: list[Message] = []
        self._dismiss_strangers()
        if self._is_full:  # There may be room again.
            self._is_full = False
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for key, events in self._selector.select(0):
            channel: Channel | None = key.data
            if channel is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                channel.flush()
                self._watch(channel)
            if events & selectors.EVENT_READ:
                messages += self._read(channel)
        return messages

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message, without waiting; a rank that is gone gets nothing.

        One that has not called rank 0 yet gets it when it does.
        """
        line = to_line(message)
        for rank in ranks:
            channel = self._channels.get(rank)
            if channel is not None:
                channel.send_line(line)
                self._watch(channel)
            elif rank not in self._gone:
                self._early.setdefault(rank, []).append(line)

    def close(self, *, timeout: float = 0.0) -> None:
        """Send what is left, for `timeout` seconds at most, and hang up."""
        deadline = time.monotonic() + timeout
        for channel in self._channels.values():
            channel.flush_until(deadline)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptors; in a fork, the replica's stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._channels.clear()
        self._ranks.clear()
        self._strangers.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # If nothing else, the caller has hung up already.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._wait_for_room(error)
            return
        channel = _channel(connection)
        self._strangers[channel] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def _wait_for_room(self, error: OSError) -> None:
        """Take no more callers until something else has happened."""
        self._is_full = True
        self._selector.unregister(self._listener)
        if self._has_been_full:
            return
        self._has_been_full = True
        logger.error(
            "rank 0 cannot take the connection of another replica, with %d there: %s. "
            "Raise the limit of open files (ulimit -n)",
            len(self._channels),
            error.strerror,
        )

    def _dismiss_strangers(self) -> None:
        """Hang up on callers that never show the token."""
        until = time.monotonic() - _PATIENCE
        for channel in [c for c, since in self._strangers.items() if since < until]:
            self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        self._unsent.discard(channel)
        self._selector.unregister(channel)
        channel.close()

    def _read(self, channel: Channel) -> list[Message]:
        messages = _receive(channel)
        rank = self._ranks.get(channel)
        if rank is None and messages:
            rank = self._rank_of(messages.pop(0))
            if rank is None:
                logger.warning("rank 0 hung up on a caller that is no replica")
                channel.is_open = False
                messages = []
            else:
                self._ranks[channel], self._channels[rank] = rank, channel
                del self._strangers[channel]
                channel.send_line(b"".join(self._early.pop(rank, [])))
                self._watch(channel)
        if not channel.is_open:
            self._forget(channel)
            if rank is not None:
                del self._channels[rank], self._ranks[channel]
                self._gone.add(rank)
                messages.append({"type": "hung_up", "rank": rank})
        return messages

    def _rank_of(self, hello: Message) -> int | None:
        """Return the rank of a caller, or None if it does not know the token."""
        token, rank = hello.get("token"), hello.get("rank")
        if not isinstance(token, str) or not isinstance(rank, int):
            return None
        knows = secrets.compare_digest(token.encode(), self._token.encode())
        return rank if knows and rank not in self._channels else None

    def _watch(self, channel: Channel) -> None:
        """Have `read` send what is left, and only as long as something is."""
        if channel.has_unsent == (channel in self._unsent):
            return  # As nearly always, of thousands of replicas.
        self._unsent ^= {channel}
        events = selectors.EVENT_READ
        if channel.has_unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(channel.connection, events, channel)


class Spoke:
    """Another replica's connection to rank 0, with the methods of `Hub`."""

    def __init__(self, store: JobStore, rank: int) -> None:
        there = store.take(HUB)
        address = Address.parse(there["address"])
        connection = socket.create_connection(
            (address.host, address.port), timeout=START_TIMEOUT
        )
        self._channel = _channel(connection)
        self._channel.send({"token": there["token"], "rank": rank})
        _held.add(self)

    def fileno(self) -> int:
        return self._channel.fileno()

    def read(self) -> list[Message]:
        self._channel.flush()
        messages = _receive(self._channel)
        if not self._channel.is_open:
            messages.append({"type": "hung_up", "rank": 0})
        return messages

    def send(self, ranks: Iterable[int], message: Message) -> None:
        assert list(ranks) == [0]
        self._channel.send(message)

    def close(self, *, timeout: float = 0.0) -> None:
        self._channel.flush_until(time.monotonic() + timeout)
        self.forget()

    def forget(self) -> None:
        self._channel.close()


Links: TypeAlias = Hub | Spoke


def _channel(connection: socket.socket) -> Channel:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for setting, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, setting, value)
    return Channel(connection, limit=_MAX_BYTES)


def _receive(channel: Channel) -> list[Message]:
    """Return the messages that have come; afterwards it may not be open."""
    try:
        return channel.receive()
    except WireError:
        channel.is_open = False
        return []


# A forked child, such as a DataLoader worker, may outlive its replica: it must not hold
# the connection that says that the replica lives.

_held: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_held):
        each.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
