"""Measure a whole process: start to first batch, and SIGTERM to exit; JSON lines.

    python benchmarks/process.py [--rounds 7]

The same loop with torch's DataLoader and with elasticrun, by turns. Both scripts import
torch; the plain one ends at SIGTERM without saving anything, elasticrun's saves a
checkpoint of a small module first.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from machine import report

COMMON = """
import sys
import torch
from torch.utils.data import TensorDataset
data = TensorDataset(torch.randn(10**6, 16))
module = torch.nn.Linear(16, 1)
"""

PLAIN = (
    COMMON
    + """
from torch.utils.data import DataLoader
for epoch in range(1000):
    for step, (batch,) in enumerate(DataLoader(data, 32, shuffle=True)):
        module(batch).sum().backward()
        if step == 0 and epoch == 0:
            print("first batch", flush=True)
"""
)

ELASTIC = (
    COMMON
    + """
import elasticrun
elasticrun.init(sys.argv[1])
elasticrun.register(model=module)
loader = elasticrun.AdaptiveDataLoader(data, 32, shuffle=True)
for epoch in elasticrun.remaining_epochs_until(1000):
    for step, (batch,) in loader.enumerate():
        module(batch).sum().backward()
        if step == 0 and epoch == 0:
            print("first batch", flush=True)
"""
)


def measure(script: str) -> tuple[float, float]:
    """Return the seconds to the first batch, and from SIGTERM to the end."""
    with tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", script, directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()
        to_first_batch = time.perf_counter() - begin
        asked = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        process.wait()
        return to_first_batch, time.perf_counter() - asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    scripts = {"torch": PLAIN, "elasticrun": ELASTIC}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in scripts}
    for _ in range(options.rounds):
        for name, script in scripts.items():
            runs[name].append(measure(script))
    for place, what in enumerate(("start_to_first_batch", "sigterm_to_exit")):
        report(
            what,
            seconds={
                name: round(statistics.median(run[place] for run in runs[name]), 3)
                for name in scripts
            },
            rounds=options.rounds,
        )


if __name__ == "__main__":
    main()
