"""Messages between the processes: one JSON object a line, of limited size."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from typing import Any

Message = dict[str, Any]

MAX_BYTES = 1 << 20


class WireError(Exception):
    """The other side sent what is no message, or one that is too long."""


class Channel:
    """One end of a stream socket that carries messages both ways.

    Args:
        limit: The longest message that is accepted, in bytes.

    Attributes:
        is_open: Whether the other side is still there, as far as is known.
    """

    def __init__(self, connection: socket.socket, *, limit: int = MAX_BYTES) -> None:
        self._connection = connection
        self._limit = limit
        self._received = bytearray()
        self._ahead: deque[Message] = deque()  # What came with one that was asked for.
        self._sending = threading.Lock()
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message; it is dropped if the other side is gone or does not read."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError:
            self.is_open = False

    def receive(self) -> list[Message]:
        """Return the messages that are there; waits if nothing has come yet.

        Raises:
            WireError: What came is no message.
        """
        try:
            data = self._connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        self._received += data
        *lines, rest = self._received.split(b"\n")
        if max(map(len, [*lines, rest])) > self._limit:
            self.is_open = False
            raise WireError(f"a message is longer than {self._limit} bytes")
        self._received = bytearray(rest)
        return [_decode(bytes(line)) for line in lines]

    def drain(self) -> list[Message]:
        """Return the messages that are there, without waiting.

        Raises:
            WireError: What came is no message.
        """
        messages = []
        self._connection.setblocking(False)
        while self.is_open and (more := self.receive()):
            messages += more
        return messages

    def receive_one(self) -> Message | None:
        """Wait for a message and return it, or None if the other side is gone."""
        while self.is_open and not self._ahead:
            self._ahead += self.receive()
        return self._ahead.popleft() if self._ahead else None

    def close(self) -> None:
        """Close this end."""
        self.is_open = False
        self._connection.close()


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{line[:80]!r} is no message") from error
    if not isinstance(message, dict):
        raise WireError(f"{line[:80]!r} is no message")
    return message
