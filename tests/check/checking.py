"""Running `elasticrun check` as a shell would, on a script of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrun.check.blame import Cause
from elasticrun.check.report import Report

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE = 900.0
# `elasticrun check`, which also hands its report to the test.
CHECK = """
import pickle, sys
from pathlib import Path
from elasticrun.__main__ import main
from elasticrun.check import command

def check(options, check=command.check):
    report = check(options)
    Path({report!r}).write_bytes(pickle.dumps(report))
    return report

command.check = check
sys.exit(main(["check", *sys.argv[1:]]))
"""


@dataclass(frozen=True)
class Checked:
    """What a check ended with."""

    code: int
    report: Report
    script: Path
    said: str  # Meanwhile.

    @property
    def cause(self) -> Cause:
        """The best explanation of the first difference."""
        return self.report.results[0].causes[0]

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
    path = folder.with_name(f"{folder.name}.report")
    path.unlink(missing_ok=True)
    words = ["-c", CHECK.format(report=str(path)), *_ordered(options, name)]
    process = _run(folder, words)
    assert path.exists(), process.stderr
    report = pickle.loads(path.read_bytes())
    return Checked(process.returncode, report, script, process.stderr)


def _ordered(options: tuple[object, ...], name: str) -> list[object]:
    place = options.index("--") if "--" in options else len(options)
    return [*options[:place], name, *options[place:]]


def run(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return _run(folder, ["-m", "elasticrun", "check", *options])


def _run(folder: Path, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
