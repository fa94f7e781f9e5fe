"""What `elasticrun run` shows: events, the replicas' lines, and a status line.

A thread writes, so that a stopped terminal (Ctrl-S) or a pipe that nobody reads does
not stop the launcher. Lines that it cannot write in time are left out, and counted in a
note; the logs have them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from elasticrun.errors import counted
from elasticrun.launcher import environment

_SEQUENCES = re.compile(
    r"\x1b\[[0-9;:]*m"  # Colours, which stay.
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # Titles, links.
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # Moves, erasures, modes.
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RANK = re.compile(r"\A\[(\d+)\]")
_COLOURS = 36, 33, 35, 32, 34, 96, 93, 95  # Red would be an alarm.
_NO_COLOUR = "\x1b[0m"
_MOST_BYTES = 8 << 20
_LINE_BYTES = 300  # What a waiting line takes beside its text.
_STALL_SECONDS = 1.0
_FLUSH_SECONDS = 3.0


class Stream:
    """A descriptor as a file of text that has no buffer, and so no lock.

    An interpreter cannot end while a thread that is stuck holds the lock of one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Write all of it; nobody need be there to read it."""
        data = text.encode("utf-8", "replace")
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # Somebody else has made it so.
                    select.select([], [self._descriptor], [])
        return len(text)


class Screen:
    """Events on stderr, and what replicas print where they did.

    Below them a terminal may keep one line: where the job is.
    """

    def __init__(
        self, out: int = 1, err: int = 2, *, has_colours: bool = False
    ) -> None:
        self._out, self._err = Stream(out), Stream(err)
        self._has_colours = has_colours
        self._line = ""

    def event(self, text: str) -> None:
        self._write(self._err, f"elasticrun: {text}\n")

    def detail(self, text: str) -> None:
        for line in text.rstrip("\n").split("\n"):
            self._write(self._err, line + "\n")

    def output(self, text: str, *, is_error: bool) -> None:
        stream = self._err if is_error else self._out
        if self._has_colours and stream.isatty():
            text = coloured_by_rank(text)
        self._write(stream, text + "\n")

    def show_status(self, text: str) -> None:
        """Show where the job is, on one line however narrow the terminal is."""
        text, columns = only_colours(text), self._num_columns()
        if len(text) >= columns:
            text = f"{text[: columns - 2]}\N{HORIZONTAL ELLIPSIS}"
        self._show(text)

    def close(self) -> None:
        """Restore the terminal."""
        self._show("")

    def _write(self, stream: Stream, text: str) -> None:
        if not stream.isatty():
            stream.write(text)
            return
        line = self._line
        self._show("")
        stream.write(only_colours(text))
        self._show(line)

    def _show(self, line: str) -> None:
        if self._line:
            self._err.write(f"\r{' ' * len(self._line)}\r")
        self._err.write(line)
        self._line = line

    def _num_columns(self) -> int:
        try:
            return os.get_terminal_size(self._err.fileno()).columns or 80
        except OSError:  # It is no terminal any more.
            return 80


def coloured_by_rank(text: str) -> str:
    """Return a line with the rank at its beginning in a colour of that rank."""
    return _RANK.sub(
        lambda m: f"\x1b[{_COLOURS[int(m[1]) % len(_COLOURS)]}m{m[0]}{_NO_COLOUR}", text
    )


def only_colours(text: str) -> str:
    """Return text that can colour a terminal, and do nothing else to it."""
    if text.isprintable():
        return text
    shown = _SEQUENCES.sub(lambda m: m[0] if _COLOUR.fullmatch(m[0]) else "", text)
    if _COLOUR.search(shown):
        body = shown.rstrip("\n")
        shown = body.removesuffix(_NO_COLOUR) + _NO_COLOUR + shown[len(body) :]
    return shown


class Console:
    """Writes events and output in order, from a thread of its own.

    While what is written is read, if slowly, the launcher keeps its pace, and so the
    replicas do. Only when nothing was read for a second lines are left out.

    Args:
        make_screen: Called in the thread that writes.

    Attributes:
        has_status_line: Whether it can show a status line.
        on_event: Called with the kind, the text and the values of each event that has a
            kind.
        last_event: The text of the last one that was shown.
    """

    def __init__(
        self, make_screen: Callable[[], Screen], *, has_status_line: bool
    ) -> None:
        self.has_status_line = has_status_line
        self.on_event: list[Callable[[str, str, dict[str, Any]], object]] = []
        self.last_event = ""
        self._make_screen = make_screen
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[Screen], None]]] = deque()
        self._num_bytes = 0
        self._num_left_out = 0
        self._live: str | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name="elasticrun-console", daemon=True
        )
        self._thread.start()

    def event(self, text: str, kind: str = "", **values: Any) -> None:
        """Write a line of the launcher's, and its further lines below."""
        first, _, rest = text.partition("\n")
        self.last_event = first
        with self._changed:
            self._add(0, lambda screen: screen.event(first))
        if rest.strip():
            self.detail(rest)
        if kind:
            self.record(kind, text, **values)

    def record(self, kind: str, text: str, **values: Any) -> None:
        """Tell of an event that needs no line."""
        for call in self.on_event:
            call(kind, text, values)

    def detail(self, text: str) -> None:
        """Say more of it, in any number of lines."""
        with self._changed:
            self._add(0, lambda screen: screen.detail(text))

    def output(self, text: str, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        size = len(text) + _LINE_BYTES
        with self._changed:
            if self._has_room(size):
                self._add(size, lambda screen: screen.output(text, is_error=is_error))
            else:
                self._num_left_out += 1

    def show_status(self, text: str) -> None:
        """Show where the job is; only a terminal can."""
        with self._changed:
            self._live = text
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, and leave the terminal; give up if it takes nothing."""
        with self._changed:
            self._add(0, lambda screen: screen.close())
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_FLUSH_SECONDS)

    def _has_room(self, size: int) -> bool:
        """Wait for room as long as the other side reads."""
        if self._num_left_out:
            # Not before half of it is free, lest each line that is read makes room for
            # one more, and for a word on those that are left out before it.
            return self._num_bytes <= _MOST_BYTES // 2

        def has_room() -> bool:
            return self._num_bytes + size <= _MOST_BYTES

        before = None
        while not has_room() and before != self._num_bytes:
            before = self._num_bytes
            self._changed.wait_for(has_room, _STALL_SECONDS)
        return has_room()

    def _add(self, size: int, call: Callable[[Screen], None]) -> None:
        if self._num_left_out:
            number, self._num_left_out = self._num_left_out, 0
            text = f"{counted(number, 'line')} left out, see the logs"
            self._waiting.append((0, lambda screen: screen.event(text)))
        self._num_bytes += size
        self._waiting.append((size, call))
        self._changed.notify_all()

    def _run(self) -> None:
        screen = self._make_screen()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._live is not None or self._is_closing
                )
                live, self._live = self._live, None
                if not self._waiting and live is None:
                    return
                size, call = self._waiting.popleft() if self._waiting else (0, None)
            if call is not None:
                call(screen)
            if live is not None and not self._is_closing:
                screen.show_status(live)
            with self._changed:
                self._num_bytes -= size
                self._changed.notify_all()


def open_console() -> Console:
    """Return one for a terminal, or else for files."""
    return Console(
        lambda: Screen(has_colours=environment.has_colours()),
        has_status_line=sys.stderr.isatty(),
    )
