"""What the user sees: a line an event, the replicas' lines, and one that lives."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class Console:
    """Writes plain lines: events to stderr, what replicas print to where they did."""

    def event(self, text: str) -> None:
        """Say what happened, in one line."""
        _write(sys.stderr, f"elasticrun: {text}\n")

    def detail(self, text: str) -> None:
        """Say more of it, in any number of lines."""
        _write(sys.stderr, text.rstrip("\n") + "\n")

    def output(self, text: str, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        _write(sys.stderr if is_error else sys.stdout, text + "\n")

    def live(self, text: str) -> None:
        """Show where the job is; only a terminal can."""

    def close(self) -> None:
        """Let the terminal be as it was."""


class LiveConsole(Console):
    """Has rich keep one line at the bottom of the terminal: where the job is."""

    def __init__(self) -> None:
        rich_console: Any = __import__("rich.console", fromlist=["Console"])
        rich_live: Any = __import__("rich.live", fromlist=["Live"])
        self._console = rich_console.Console(stderr=True, highlight=False)
        self._live = rich_live.Live(
            "",
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def event(self, text: str) -> None:
        """Say what happened, in one line."""
        self._console.print(f"elasticrun: {text}", style="bold", markup=False)

    def detail(self, text: str) -> None:
        """Say more of it, in any number of lines."""
        self._console.out(text.rstrip("\n"), highlight=False)

    def output(self, text: str, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        if is_error or sys.stdout.isatty():
            self._console.out(text, highlight=False)
        else:
            super().output(text, is_error=is_error)

    def live(self, text: str) -> None:
        """Show where the job is; only a terminal can."""
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Let the terminal be as it was."""
        self._live.stop()


def open_console() -> Console:
    """Return one that fits: rich's on a terminal that has it, else plain lines."""
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            return LiveConsole()
    return Console()


def _write(stream: TextIO, text: str) -> None:
    """Write a line; nobody need be there to read it."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()
