"""What replicas print: cut into lines, marked with the rank, and shown."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable

_MAX_LINE = 1 << 16
_READ_BYTES = 1 << 16
# Messages of torch's C++ part, and the stacks that follow them.
_MESSAGE = re.compile(rb"\[[WEF]\d{4} [\d:.]+ (\S+\.cpp:\d+)\]")
_STACK = re.compile(rb"\s*(frame #\d+: |Exception raised from )")
_NUM_SHOWN = 3  # Of each, before the others are hidden.


class LineReader:
    """Reads a pipe without waiting, and hands each line on with its line end.

    A line without an end waits for it, unless it is very long or the last.
    """

    def __init__(self, descriptor: int, on_line: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        self.is_open = True

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> int:
        """Take what is there; return how many bytes that was."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.is_open = False
            return 0
        self.take(data)
        return len(data)

    def take(self, data: bytes) -> None:
        """Process data that was read from the pipe before."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line + b"\n")
        if len(self._rest) > _MAX_LINE:
            self._on_line(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Take what is left, and close the pipe.

        More than the pipe holds is not waited for: a process that the replica has left
        behind may go on to print into it.
        """
        most = fcntl.fcntl(self._descriptor, fcntl.F_GETPIPE_SZ)
        while most > 0 and (num_bytes := self.read()):
            most -= num_bytes
        if self._rest:
            self._on_line(self._rest + b"\n")
        os.close(self._descriptor)


class Repeats:
    """Knows which lines of one replica the console need not show; its log has all.

    NCCL's threads and its store's clients warn every second, each time with another
    time and often with a stack, which would bury why the replica died.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._is_hiding = False

    def filtered(self, line: bytes) -> bytes:
        """Return the line as it is to be shown; empty if it is not."""
        message = _MESSAGE.search(line)
        if message is None:
            self._is_hiding = self._is_hiding and _STACK.match(line) is not None
            return b"" if self._is_hiding else line
        count = self._counts[message[1]] = self._counts.get(message[1], 0) + 1
        self._is_hiding = count > _NUM_SHOWN
        if count == _NUM_SHOWN:
            return line.rstrip(b"\n") + b" (again; more of these only in its log)\n"
        return b"" if self._is_hiding else line


def marked(rank: int, line: bytes) -> str:
    """Return a line as a terminal shows it: with its rank, and what was drawn last.

    A progress bar returns to the start of its line and draws over it.
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    return f"[{rank}] {text.rpartition(chr(13))[2]}"
