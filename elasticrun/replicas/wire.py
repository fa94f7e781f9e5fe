"""Messages between processes: one JSON object a line, over a socket.

Replicas' watchers talk so, and so do the launcher, its replicas and its commands.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
import time
from collections import deque
from typing import Any

Message = dict[str, Any]

_MAX_BYTES = 1 << 20
_AT_ONCE = 1 << 16
_ENOUGH_FILES = 1 << 16  # Rank 0 has three for each other replica, the launcher five.


class WireError(Exception):
    """The other side sent what is no message, or one that is too long."""


class Channel:
    """One end of a stream socket that carries messages both ways.

    Whether it waits is the socket's affair: on one that does not block, what cannot be
    sent now is sent by a later `flush`. Any thread may send, one may receive.

    Args:
        limit: The longest message that is accepted, in bytes.

    Attributes:
        is_open: Whether the other side is still there, as far as is known. That it is
            gone shows when its last words have been received.
    """

    def __init__(self, connection: socket.socket, *, limit: int = _MAX_BYTES) -> None:
        self.connection = connection
        self._limit = limit
        self._received = bytearray()
        self._ahead: deque[Message] = deque()  # What came with one that was asked for.
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self.is_open = True

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the other side is gone or does not read."""
        self.send_line(to_line(message))

    def send_line(self, line: bytes) -> None:
        """Send a message as `to_line` has written it, perhaps for many channels."""
        with self._sending:
            self._unsent += line
            self._send_unsent()

    def flush(self) -> None:
        """Send what the connection takes of what was left."""
        with self._sending:
            self._send_unsent()

    def flush_until(self, deadline: float) -> None:
        """Send what was left, until then at most; the socket does not block."""
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.connection, select.POLLOUT)
            if any(event & ~select.POLLOUT for _, event in poll.poll(left * 1000)):
                return  # The other end is gone.
            self.flush()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except TimeoutError:  # It does not read.
            self.is_open = False
        except OSError:  # It is gone, but may have said something before.
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Return the messages that are there; waits if nothing has come yet."""
        try:
            data = self.connection.recv(_AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if max(map(len, [*lines, self._received])) > self._limit:
            self.is_open = False
            raise WireError(f"a message is longer than {self._limit} bytes")
        return [_decode(line) for line in lines]

    def drain(self) -> list[Message]:
        """Return the messages that are there, without waiting."""
        messages = []
        self.connection.setblocking(False)
        while self.is_open and (more := self.receive()):
            messages += more
        return messages

    def receive_one(self) -> Message | None:
        """Wait for a message and return it, or None if the other side is gone."""
        while self.is_open and not self._ahead:
            self._ahead += self.receive()
        return self._ahead.popleft() if self._ahead else None

    def ahead(self) -> list[Message]:
        """Return the messages that came with those that `receive_one` returned."""
        messages = list(self._ahead)
        self._ahead.clear()
        return messages

    def close(self) -> None:
        self.is_open = False
        self.connection.close()


def raise_limit_of_open_files() -> None:
    """Raise the soft limit, often 1,024, as far as the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = (
        _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    )
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # The system has another bound.
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def to_line(message: Message) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytearray) -> Message:
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"{bytes(line[:80])!r} is no message") from error
    if not isinstance(message, dict):
        raise WireError(f"{bytes(line[:80])!r} is no message")
    return message
