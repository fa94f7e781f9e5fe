"""A connection between rank 0 and each other replica, for their watchers' messages.

Messages are lines of JSON. A process that is killed can tell nobody, but its connection
is closed for it, so rank 0 learns of a death at once; of a machine that is gone, it
learns within a minute from TCP's keep-alive. Nothing here ever waits: what cannot be
sent now is sent when the connection takes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import selectors
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from elasticrun.control.store import START_TIMEOUT, Address, JobStore

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_BACKLOG = 1024
_MAX_LINE = 1 << 16
# Seconds before the first probe of a silent connection, between probes, and how many
# may stay unanswered; where the system has these settings.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Links(Protocol):
    """One replica's connections.

    `fileno` is for `poll`: when it becomes readable, there is something to do in
    `read`.
    """

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        ...

    def read(self) -> list[Message]:
        """Return the messages that have come, without waiting; send what was left.

        The last one from a rank that is gone is {"type": "hung_up", "rank": rank}.
        """
        ...

    def send(self, rank: int, message: Message) -> None:
        """Send a message, without waiting; to a rank that is gone, nothing happens."""
        ...

    def close(self, *, timeout: float = 0.0) -> None:
        """Send what is left, for `timeout` seconds at most, and hang up."""
        ...

    def forget(self) -> None:
        """Close this process's descriptors; in a fork, the replica's stay open."""
        ...


class Hub:
    """Rank 0's connections to all others."""

    def __init__(self, store: JobStore) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((store.interface, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._lines: dict[int, _Line] = {}
        address = Address(store.address.host, self._listener.getsockname()[1])
        store.put("hub", {"address": str(address), "token": self._token})
        _held.add(self)

    def fileno(self) -> int:
        return self._selector.fileno()

    def read(self) -> list[Message]:
        messages: list[Message] = []
        for key, events in self._selector.select(0):
            line: _Line | None = key.data
            if line is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                line.flush()
                self._watch(line)
            if events & selectors.EVENT_READ:
                messages += self._read_line(line)
        return messages

    def send(self, rank: int, message: Message) -> None:
        line = self._lines.get(rank)
        if line is not None:
            line.send(message)
            self._watch(line)

    def close(self, *, timeout: float = 0.0) -> None:
        deadline = time.monotonic() + timeout
        for line in self._lines.values():
            line.flush_until(deadline)
        self.forget()

    def forget(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._lines.clear()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The caller has hung up already.
            connection, _ = self._listener.accept()
            line = _Line(connection)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _read_line(self, line: _Line) -> list[Message]:
        messages = line.receive()
        if line.rank is None and messages:
            rank = self._rank_of(messages.pop(0))
            if rank is None:
                logger.warning("rank 0 hung up on a caller that is no replica")
                line.is_open = False
                messages = []
            else:
                line.rank = rank
                self._lines[rank] = line
        if not line.is_open:
            self._selector.unregister(line.connection)
            line.connection.close()
            if line.rank is not None:
                del self._lines[line.rank]
                messages.append({"type": "hung_up", "rank": line.rank})
        return messages

    def _rank_of(self, hello: Message) -> int | None:
        """Return the rank of a caller, or None if it does not know the token."""
        token, rank = hello.get("token"), hello.get("rank")
        if not isinstance(token, str) or not isinstance(rank, int):
            return None
        knows = secrets.compare_digest(token.encode(), self._token.encode())
        return rank if knows and rank not in self._lines else None

    def _watch(self, line: _Line) -> None:
        events = selectors.EVENT_READ
        if line.has_unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(line.connection, events, line)


class Spoke:
    """Another replica's connection to rank 0."""

    def __init__(self, store: JobStore, rank: int) -> None:
        there = store.take("hub")
        address = Address.parse(there["address"])
        connection = socket.create_connection(
            (address.host, address.port), timeout=START_TIMEOUT
        )
        self._line = _Line(connection)
        self._line.send({"token": there["token"], "rank": rank})
        _held.add(self)

    def fileno(self) -> int:
        return self._line.connection.fileno()

    def read(self) -> list[Message]:
        self._line.flush()
        messages = self._line.receive()
        if not self._line.is_open:
            messages.append({"type": "hung_up", "rank": 0})
        return messages

    def send(self, rank: int, message: Message) -> None:
        assert rank == 0
        self._line.send(message)

    def close(self, *, timeout: float = 0.0) -> None:
        self._line.flush_until(time.monotonic() + timeout)
        self.forget()

    def forget(self) -> None:
        self._line.connection.close()


class _Line:
    """One connection: lines of JSON, both ways."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self.rank: int | None = None
        self.is_open = True
        self._received = b""
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[Message]:
        """Return the messages that have come; afterwards it may not be open."""
        try:
            data = self.connection.recv(_MAX_LINE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        self.is_open = bool(data) and len(self._received) <= _MAX_LINE
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.is_open = False
                break
            messages.append(message)
        return messages

    def send(self, message: Message) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes; a broken one shows when it is read."""
        with contextlib.suppress(OSError):
            while self._unsent:
                sent = self.connection.send(self._unsent)
                self._unsent = self._unsent[sent:]

    def flush_until(self, deadline: float) -> None:
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.connection, select.POLLOUT)
            if any(event & ~select.POLLOUT for _, event in poll.poll(left * 1000)):
                return  # The other end is gone.
            self.flush()


# A forked child, such as a DataLoader worker, may outlive its replica: it must not hold
# the connection that says that the replica lives.

_held: weakref.WeakSet[Hub | Spoke] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_held):
        each.forget()
    _held.clear()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_in_child)
