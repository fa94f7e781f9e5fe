"""Lints the script in another process, while its replicas start."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrun.launcher import processes

if TYPE_CHECKING:
    from elasticrun.launcher.event_loop import EventLoop
    from elasticrun.launcher.terminal.console import Console

_SECONDS = 30.0  # The linter has these; few scripts need one of them.


class Linting:
    """Shows what the linter finds but hints; never keeps the job from training.

    The linter runs beside replicas that import torch meanwhile, so nobody waits for it.
    It says all at its end.
    """

    def __init__(self, path: Path | None, console: Console, loop: EventLoop) -> None:
        self._console = console
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._path = path
        self._deadline = time.monotonic() + _SECONDS
        if path is None:
            return
        command = [sys.executable, "-m", "elasticrun.launcher.linting"]
        command += [str(os.getpid()), str(path)]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            loop.watch(self._process.stdout, self._read)
            self._limit = loop.call_later(_SECONDS, self._give_up)

    def finish(self, wakeups: int) -> None:
        """Wait for the end of the linter, but no longer than until a signal comes."""
        if self._process is not None:
            sources: list[Any] = [self._process.stdout, wakeups]
            seconds = max(0.0, self._deadline - time.monotonic())
            if self._process.stdout in select.select(sources, [], [], seconds)[0]:
                self._read()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._loop.forget(process.stdout)
            self._limit.cancel()
            process.kill()
            process.communicate()

    def _read(self) -> None:
        """Show what was found; all of it comes at once, right before the end."""
        assert self._process is not None
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        self.close()
        self._show(output)

    def _give_up(self) -> None:
        self.close()
        self._console.event(
            f"the linter was not done after {_SECONDS:.0f} seconds, and was ended; "
            f"`elasticrun lint {self._path}` takes the time that it needs"
        )

    def _show(self, output: bytes) -> None:
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:
            return  # a linter that failed has nothing to warn of
        if not report["elastic"]:
            if not report["problems"]:  # Which may be why nothing is known of it.
                self._console.event(
                    f"warning: {self._path} does not use elasticrun, nor do the "
                    "modules beside it: every replica trains by itself on all data, "
                    "and nothing is saved or resumed; `elasticrun lint` says what to "
                    "change"
                )
            return
        findings: list[dict[str, Any]] = report["findings"]
        for each in findings:
            where = f"{each['path']}:{each['line']}:{each['column']}"
            self._console.event(f"warning: {where}: {each['code']} {each['message']}")
        if findings:
            codes = " ".join(sorted({each["code"] for each in findings}))
            self._console.event(
                f"`elasticrun rule {codes}` explains them; --no-lint hides them"
            )


def main(launcher: int, path: str) -> int:
    """Lint a script for as long as its launcher lives."""
    processes.die_with_parent(launcher)
    from elasticrun.lint.command import run

    return run(["--format", "json", "--", path])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
