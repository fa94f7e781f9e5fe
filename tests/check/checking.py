"""Running `elasticrun check` as a shell would, on a script of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE = 900.0


@dataclass(frozen=True)
class Checked:
    """What a check ended with."""

    code: int
    report: dict[str, Any]
    script: Path
    said: str  # Meanwhile.

    @property
    def cause(self) -> dict[str, Any]:
        """The best explanation of the first difference."""
        cause: dict[str, Any] = self.report["results"][0]["causes"][0]
        return cause

    def line_of(self, text: str) -> int:
        """Return the number of the script's one line that holds a text."""
        lines = self.script.read_text().splitlines()
        (number,) = [n for n, line in enumerate(lines, 1) if text in line]
        return number


def check(folder: Path, name: str, *options: object) -> Checked:
    """Check a copy of a script; options come before it, its arguments after "--"."""
    script = folder / name
    if not script.exists():
        shutil.copy(SCRIPTS / name, script)
    process = run(folder, "--format", "json", *_ordered(options, name))
    assert process.stdout, process.stderr
    report = json.loads(process.stdout)
    return Checked(process.returncode, report, script, process.stderr)


def _ordered(options: tuple[object, ...], name: str) -> list[object]:
    place = options.index("--") if "--" in options else len(options)
    return [*options[:place], name, *options[place:]]


def run(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticrun", "check", *map(str, options)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
