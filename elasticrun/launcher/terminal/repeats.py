"""Messages of torch's C++ part that come again and again, as after a death."""

from __future__ import annotations

import re

_MESSAGE = re.compile(rb"\[[WEF]\d{4} [\d:.]+ (\S+\.cpp:\d+)\]")
_STACK = re.compile(rb"\s*(frame #\d+: |Exception raised from )")
_NUM_SHOWN = 3


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
