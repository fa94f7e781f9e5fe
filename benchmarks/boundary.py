"""Measure what a boundary costs the training thread, at 1 and 4 replicas; JSON lines.

    python benchmarks/boundary.py

The cost is that of counting the samples and passing the boundary, as the loader does
after each global batch, with the watcher running and nothing requested.
"""

from __future__ import annotations

import statistics
import tempfile
import time

from machine import report

import elasticrun
from elasticrun.testing import run_generation

NUM_BOUNDARIES = 200_000


def microseconds_per_boundary(checkpoint_dir: str) -> float:
    """Return the cost on this replica; the shortest of five rounds."""
    elasticrun.init(checkpoint_dir)
    job = elasticrun.current_job()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(NUM_BOUNDARIES):
            job.progress.advance(32)
            job.boundary.reach()
        times.append(time.perf_counter() - begin)
    return min(times) / NUM_BOUNDARIES * 1e6


def main() -> None:
    for world_size in (1, 4):
        with tempfile.TemporaryDirectory() as directory:
            costs = run_generation(microseconds_per_boundary, world_size, directory)
        report(
            "boundary",
            world_size=world_size,
            microseconds=round(statistics.median(costs), 3),
        )


if __name__ == "__main__":
    main()
