"""The terminal, or the file in its place, to which the launcher writes."""

from __future__ import annotations

import contextlib
import os
import re
import select

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
_COLOURS = 36, 33, 35, 32, 34, 96, 93, 95  # Of those that are no alarm: no red.
_NO_COLOUR = "\x1b[0m"


class Stream:
    """A descriptor as a file of text that has no buffer, and so no lock.

    An interpreter cannot end while a thread that is stuck holds the lock of one.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def flush(self) -> None:
        """Do nothing: it is written."""

    def write(self, text: str) -> int:
        """Write all of it; nobody need be there to read it."""
        data = text.encode(self.encoding, "replace")
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # Somebody else has made it so.
                    select.select([], [self._descriptor], [])
        return len(text)


class Screen:
    """Plain lines: events to stderr, what replicas print to where they did."""

    def __init__(
        self, out: int = 1, err: int = 2, *, has_colours: bool = False
    ) -> None:
        self._out, self._err = Stream(out), Stream(err)
        self._has_colours = has_colours

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
        """Show where the job is; only a terminal can."""

    def close(self) -> None:
        """Restore the terminal."""

    def _write(self, stream: Stream, text: str) -> None:
        stream.write(only_colours(text) if stream.isatty() else text)


class StatusLineScreen(Screen):
    """Keeps one line at the bottom of the terminal: where the job is."""

    def __init__(
        self, out: int = 1, err: int = 2, *, has_colours: bool = False
    ) -> None:
        super().__init__(out, err, has_colours=has_colours)
        self._line = ""

    def show_status(self, text: str) -> None:
        """Show where the job is, on one line however narrow the terminal is."""
        text, columns = only_colours(text), self._num_columns()
        if len(text) >= columns:
            text = f"{text[: columns - 2]}\N{HORIZONTAL ELLIPSIS}"
        self._show(text)

    def close(self) -> None:
        self._show("")

    def _write(self, stream: Stream, text: str) -> None:
        if not stream.isatty():
            super()._write(stream, text)
            return
        line = self._line
        self._show("")
        super()._write(stream, text)
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
