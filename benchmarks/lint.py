"""Measure the linter: scripts of 1,000 lines in all, start-up included; one JSON line.

    python benchmarks/lint.py [--rounds 9]

Each round starts `python -m elasticrun.lint` anew, on scripts of tests/lint/styles, and
an interpreter that does nothing. Medians of wall-clock and of processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import report

STYLES = Path(__file__).parents[1] / "tests" / "lint" / "styles"
LINES = 1000


def scripts() -> tuple[list[Path], int]:
    """Return scripts with at least so many lines, and how many lines they have."""
    chosen: list[Path] = []
    count = 0
    for path in sorted(STYLES.glob("*.py")):
        if count < LINES:
            chosen.append(path)
            count += path.read_text(encoding="utf-8").count("\n")
    return chosen, count


def measure(command: list[str]) -> tuple[float, float]:
    """Return the wall-clock and processor seconds of a process from start to end."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    return wall, cpu - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    paths, count = scripts()
    lint = [sys.executable, "-m", "elasticrun.lint", *map(str, paths)]
    nothing = [sys.executable, "-c", "pass"]
    times = [(measure(lint), measure(nothing)) for _ in range(rounds)]
    report(
        "lint",
        lines=count,
        seconds=round(statistics.median(each[0][0] for each in times), 4),
        cpu_seconds=round(statistics.median(each[0][1] for each in times), 4),
        interpreter_seconds=round(statistics.median(e[1][0] for e in times), 4),
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
