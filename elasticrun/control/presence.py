"""Who is there: a connection from each replica to rank 0, which ends when it dies.

A process that is killed can tell nobody, but its connections are closed for it. A
machine that is gone is noticed by TCP's keep-alive, within a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from elasticrun.control.store import START_TIMEOUT, Address, JobStore

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_FAREWELL = b"\n"
_MAX_LINE = 64
# Seconds before the first probe of a silent connection, between probes, and how many
# may stay unanswered; where the system has these settings.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Roll:
    """Rank 0's side: learns at once when another replica is gone without a farewell.

    `fileno` is for `poll`; after it becomes readable, `read` returns the news.
    """

    def __init__(self, store: JobStore) -> None:
        self._token = secrets.token_hex(16).encode()
        self._listener = socket.create_server((store.interface, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        address = Address(store.address.host, self._listener.getsockname()[1])
        store.put("roll", {"address": str(address), "token": self._token.decode()})
        _held.add(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._selector.fileno()

    def read(self) -> list[int]:
        """Return the ranks that are gone since the last call, without waiting."""
        gone = []
        for key, _ in self._selector.select(0):
            caller: _Caller | None = key.data
            if caller is None:
                self._accept()
            elif caller.has_hung_up(self._token):
                self._selector.unregister(caller.connection)
                caller.connection.close()
                if caller.rank is not None and not caller.has_said_farewell:
                    gone.append(caller.rank)
        return gone

    def close(self) -> None:
        """Stop listening."""
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptors."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The caller has hung up already.
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            _keep_alive(connection)
            self._selector.register(
                connection, selectors.EVENT_READ, _Caller(connection)
            )


@dataclass
class _Caller:
    """Somebody who has connected to rank 0: a replica once it has named itself."""

    connection: socket.socket
    rank: int | None = None
    has_said_farewell: bool = False
    _received: bytes = b""

    def has_hung_up(self, token: bytes) -> bool:
        """Read what there is; return whether the connection has ended."""
        try:
            data = self.connection.recv(_MAX_LINE)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if self.rank is not None:
            self.has_said_farewell |= data == _FAREWELL
            return not data
        self._received += data
        line, end, rest = self._received.partition(b"\n")
        if end:
            said, _, rank = line.partition(b" ")
            if not secrets.compare_digest(said, token) or not rank.isdigit():
                logger.warning("rank 0 hung up on a caller that is no replica")
                return True
            self.rank = int(rank)
            self.has_said_farewell = rest == _FAREWELL
        return not data or len(self._received) > 2 * _MAX_LINE


class Presence:
    """Another replica's side: as long as it lives, the connection stands."""

    def __init__(self, store: JobStore, rank: int) -> None:
        there = store.take("roll")
        address = Address.parse(there["address"])
        self._connection = socket.create_connection(
            (address.host, address.port), timeout=START_TIMEOUT
        )
        _keep_alive(self._connection)
        self._connection.sendall(f"{there['token']} {rank}\n".encode())
        _held.add(self)

    def close(self) -> None:
        """Leave politely: rank 0 must not take it for a death."""
        # Rank 0 may have gone first, and then nobody minds.
        with contextlib.suppress(OSError):
            self._connection.sendall(_FAREWELL)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptor."""
        self._connection.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# A forked child, such as a DataLoader worker, may outlive its replica: it must not hold
# the connection that says that the replica lives.

_held: weakref.WeakSet[Roll | Presence] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_held):
        each.forget()
    _held.clear()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_forget_in_child)
