"""Measure what it costs to resume: time and memory to the first batch; JSON lines.

    python benchmarks/resume.py [--rounds 5]

Each measurement is a process of its own. `milliseconds` is from `iter` to the first
batch after the state was loaded, `megabytes` what the process's peak memory grew by
meanwhile. The data set computes its samples, so it takes no memory itself. torchdata's
StatefulDataLoader stands beside it up to 10^7 samples; beyond, it would need 8 bytes a
sample and draw each of the skipped ones. Its state at 90 % is taken from a loop that
went there, once; elasticrun's is a position, so the position is put in.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import report
from torch.utils.data import Dataset

from elasticrun import AdaptiveDataLoader

BATCH_SIZE = 32


class Numbers(Dataset[int]):
    """As many samples as asked for, each its own index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


def measure(
    library: str, num_samples: int, index: int, state_file: str
) -> dict[str, float]:
    """Resume one loader at `index` in this process."""
    loader = make_loader(library, num_samples)
    if index and library == "elasticrun":
        loader.load_state_dict({**loader.state_dict(), "index": index})
    elif index:
        loader.load_state_dict(torch.load(state_file, weights_only=False))
    before = peak_megabytes()
    begin = time.perf_counter()
    next(iter(loader))
    seconds = time.perf_counter() - begin
    return {"milliseconds": seconds * 1e3, "megabytes": peak_megabytes() - before}


def make_loader(library: str, num_samples: int) -> Any:
    """Return a shuffled loader."""
    if library == "elasticrun":
        return AdaptiveDataLoader(Numbers(num_samples), BATCH_SIZE, shuffle=True)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(num_samples), BATCH_SIZE, shuffle=True)


def save_state_at(index: int, num_samples: int, state_file: str) -> None:
    """Loop over torchdata's loader up to `index`, and keep its state."""
    loader = make_loader("torchdata", num_samples)
    for _ in itertools.islice(loader, index // BATCH_SIZE):
        pass
    torch.save(loader.state_dict(), state_file)


def peak_megabytes() -> float:
    """Return the most memory that the process has had so far.

    Not from `getrusage`, whose figure a process has from its parent at first.
    """
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        library, num_samples, index, state_file = options.measure
        print(json.dumps(measure(library, int(num_samples), int(index), state_file)))
        return
    for library, num_samples in (
        ("elasticrun", 10**7),
        ("elasticrun", 10**9),
        ("torchdata", 10**7),
    ):
        compare(library, num_samples, options.rounds)


def compare(library: str, num_samples: int, num_rounds: int) -> None:
    """Report the beginning and 90 % of a loop, measured in turns."""
    late = num_samples * 9 // 10 // BATCH_SIZE * BATCH_SIZE
    figures: dict[int, list[dict[str, float]]] = {0: [], late: []}
    with tempfile.NamedTemporaryFile() as state_file:
        if library == "torchdata":
            save_state_at(late, num_samples, state_file.name)
        for _ in range(num_rounds):
            for index, runs in figures.items():
                runs.append(measure_apart(library, num_samples, index, state_file.name))
    medians = {
        "start" if index == 0 else "late": {
            key: round(statistics.median(run[key] for run in runs), 2)
            for key in ("milliseconds", "megabytes")
        }
        for index, runs in figures.items()
    }
    report(
        "resume",
        library=library,
        num_samples=num_samples,
        **medians,
        ratio=round(
            medians["late"]["milliseconds"] / medians["start"]["milliseconds"], 2
        ),
        rounds=num_rounds,
    )


def measure_apart(
    library: str, num_samples: int, index: int, state_file: str
) -> dict[str, float]:
    """Measure in a fresh process."""
    arguments = [library, str(num_samples), str(index), state_file]
    process = subprocess.run(
        [sys.executable, __file__, "--measure", *arguments],
        capture_output=True,
        check=True,
    )
    result: dict[str, float] = json.loads(process.stdout)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
