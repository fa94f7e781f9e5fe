"""Measure the linter: scripts of 1,000 lines in all, start-up included; one JSON line.

    python benchmarks/lint.py [--rounds 9] [--tree]

Each round starts `elasticrun lint` anew, on scripts of tests/lint/styles, and
an interpreter that does nothing. Medians of wall-clock and of processor time, with
elasticrun compiled, as pip leaves it.

With `--tree` another line: a folder that has the packages installed beside torch, the
largest ones first, of some 8,500 files; processor time, and the most memory, which the
linter's process reads itself: the figure that a parent gets begins with its own memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import report

STYLES = Path(__file__).parents[1] / "tests" / "lint" / "styles"
LINES = 1000
FILES = 8500
LINT_AND_TELL_PEAK = """
import re, sys
from pathlib import Path
from elasticrun.lint.command import run
run(sys.argv[1:2])
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
Path(sys.argv[2]).write_text(peak)
"""


def scripts() -> tuple[list[Path], int]:
    """Return scripts with at least so many lines, and how many lines they have."""
    chosen: list[Path] = []
    count = 0
    for path in sorted(STYLES.glob("*.py")):
        if count < LINES:
            chosen.append(path)
            count += path.read_text(encoding="utf-8").count("\n")
    return chosen, count


def tree_in(folder: Path) -> int:
    """Link installed packages into a folder; return how many files they have."""
    installed = Path(torch.__file__).parents[1]
    sizes = {
        each: sum(1 for _ in each.rglob("*.py"))
        for each in installed.iterdir()
        if (each / "__init__.py").exists()
    }
    count = 0
    for package in sorted(sizes, key=lambda each: (-sizes[each], each.name)):
        if count + sizes[package] <= FILES:
            shutil.copytree(package, folder / package.name)
            count += sizes[package]
    return count


def report_tree() -> None:
    with tempfile.TemporaryDirectory() as name:
        count = tree_in(Path(name))
        peak = Path(name, "peak")
        _, cpu = measure([sys.executable, "-c", LINT_AND_TELL_PEAK, name, str(peak)])
        mib = int(peak.read_text()) >> 10
    report("lint-tree", files=count, cpu_seconds=round(cpu, 1), mib=mib)


def measure(command: list[str]) -> tuple[float, float]:
    """Return the wall-clock and processor seconds of a process from start to end."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=own)
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    return wall, cpu - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    paths, count = scripts()
    lint = [sys.executable, "-m", "elasticrun", "lint", *map(str, paths)]
    nothing = [sys.executable, "-c", "pass"]
    measure(lint)  # which compiles it
    times = [(measure(lint), measure(nothing)) for _ in range(rounds)]
    report(
        "lint",
        lines=count,
        seconds=round(statistics.median(each[0][0] for each in times), 4),
        cpu_seconds=round(statistics.median(each[0][1] for each in times), 4),
        interpreter_seconds=round(statistics.median(e[1][0] for e in times), 4),
        rounds=rounds,
    )
    if options.tree:
        report_tree()


if __name__ == "__main__":
    main()
