"""Measure what the first saves cost the training thread; JSON lines.

    python benchmarks/in_flight.py [--gibibytes 1] [--saves 4] [--directory DIR]

One process trains with steps of some milliseconds and saves in flight. For each save:
how long the training thread waits, and how long steps take until it is committed, in
the mean and in the median, as a ratio to as many steps that come before it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from checkpoint import Elastic, make_module
from machine import report


def measure(directory: Path, gibibytes: float, num_saves: int) -> None:
    job = Elastic(make_module(gibibytes), directory, async_save=True).job
    matrix = torch.randn(600, 600)

    def step() -> float:
        begin = time.perf_counter()
        torch.tanh(matrix @ matrix)
        job.boundary.reach()
        return time.perf_counter() - begin

    for number in range(num_saves):
        before = [step() for _ in range(2000 if number == 0 else 1000)][-1000:]
        newest = job.newest_checkpoint
        job.boundary.request_checkpoint()
        blocked = step()
        during = []
        while job.newest_checkpoint is newest:
            during.append(step())
        before = before[-len(during) :]
        report(
            "in flight",
            gibibytes=gibibytes,
            save=number + 1,
            blocked=round(blocked, 3),
            step=round(statistics.median(before), 5),
            mean=round(statistics.mean(during) / statistics.mean(before), 3),
            median=round(statistics.median(during) / statistics.median(before), 3),
        )
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gibibytes", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(Path(directory) / "job", options.gibibytes, options.saves)


if __name__ == "__main__":
    main()
