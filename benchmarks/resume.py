"""Measure what it costs to resume: time and memory to the first batch; JSON lines.

    python benchmarks/resume.py [--rounds 5]

Each measurement is a process of its own. `milliseconds` is from `iter` to the first
batch after the state was loaded, `megabytes` what the process's peak memory grew by
meanwhile. The data set computes its samples, so it takes no memory itself. torchdata's
StatefulDataLoader stands beside it up to 10^7 samples; beyond, it would need 8 bytes a
sample and draw each of the skipped ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
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


def measure(library: str, num_samples: int, index: int) -> dict[str, float]:
    """Resume one loader at `index` in this process."""
    loader = make_loader(library, num_samples)
    if index:
        loader.load_state_dict(state_at(library, loader, index))
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


def state_at(library: str, loader: Any, index: int) -> dict[str, Any]:
    """Return the state that the loader would have had at `index`."""
    if library == "elasticrun":
        state: dict[str, Any] = loader.state_dict()
        return {**state, "index": index}
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    text = json.dumps(state, default=lambda value: value.tolist())
    del iterator, text
    num_batches = index // BATCH_SIZE
    state["_num_yielded"] = num_batches
    state["_sampler_iter_yielded"] = num_batches
    if state.get("_sampler_iter_state"):
        state["_sampler_iter_state"]["samples_yielded"] = index
    return state


def peak_megabytes() -> float:
    """Return the most memory that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        library, num_samples, index = options.measure
        print(json.dumps(measure(library, int(num_samples), int(index))))
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
    for _ in range(num_rounds):
        for index in figures:
            figures[index].append(measure_apart(library, num_samples, index))
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


def measure_apart(library: str, num_samples: int, index: int) -> dict[str, float]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--measure", library]
    process = subprocess.run(
        [*command, str(num_samples), str(index)], capture_output=True, check=True
    )
    result: dict[str, float] = json.loads(process.stdout)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
