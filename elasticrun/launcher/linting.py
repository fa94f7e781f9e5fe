"""Lints the script in another process, while its replicas start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.options import Program
from elasticrun.launcher.terminal.console import Console

_SECONDS = 30.0  # what a job that is already over waits for the linter


class Linting:
    """Shows what the linter finds but hints; never keeps the job from training.

    The linter runs beside replicas that import torch meanwhile, so nobody waits for it.
    It says all at its end.
    """

    def __init__(self, program: Program, console: Console, loop: EventLoop) -> None:
        self._console = console
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._path = program.file
        if program.file is None:
            return
        command = [sys.executable, "-m", "elasticrun.lint", "--format", "json"]
        command.append(str(program.file))
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            loop.watch(self._process.stdout, self.close)

    def close(self) -> None:
        """Show what was found, unless that is done; the process is forgotten."""
        process, self._process = self._process, None
        if process is None:
            return
        self._loop.forget(process.stdout)
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        else:
            self._show(output)

    def _show(self, output: bytes) -> None:
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:
            return  # a linter that failed has nothing to warn of
        if not report["elastic"]:
            self._console.event(
                f"warning: {self._path} does not use elasticrun, nor do the modules "
                "beside it: every replica trains by itself on all data, and nothing is "
                "saved or resumed; `elasticrun lint` says what to change"
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
