"""Measure a checkpoint of 1 GiB of parameters beside torch.save with fsync; JSON lines.

    python benchmarks/save.py [--gibibytes 1] [--rounds 5] [--directory DIR]

`seconds` is all the time that training is blocked: nothing of a save happens elsewhere.
elasticrun's includes the checksums of the files, their fsync, the manifest and the
removal of the oldest checkpoint; torch's is `torch.save`, flush and fsync of one file.
`load` is until the parameters are in the module, checksums verified.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import report

import elasticrun
from elasticrun.current import current_job


def make_module(gibibytes: float) -> torch.nn.Module:
    """Return 16 tensors of float32."""
    num_values = int(gibibytes * 2**28 / 16)
    values = (torch.nn.Parameter(torch.randn(num_values)) for _ in range(16))
    return torch.nn.ParameterList(values)


def save_with_torch(module: torch.nn.Module, path: Path) -> None:
    """Write a file with torch alone, durably."""
    with open(path, "wb") as file:
        torch.save(module.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def seconds(call: Callable[[], object]) -> float:
    """Return how long the call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gibibytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(Path(directory), options.gibibytes, options.rounds)


def measure(directory: Path, gibibytes: float, num_rounds: int) -> None:
    """Save by turns."""
    elasticrun.init(directory / "checkpoints", save_interval="off", keep=1)
    module = make_module(gibibytes)
    elasticrun.register(model=module)
    own, torchs = [], []
    for _ in range(num_rounds):
        own.append(seconds(elasticrun.save_all_states))
        path = directory / "model.pt"
        torchs.append(seconds(lambda path=path: save_with_torch(module, path)))
        path.unlink()
    newest = current_job().newest_checkpoint
    assert newest is not None
    load = seconds(lambda: module.load_state_dict(read(newest.path / "model")))
    report(
        "save",
        gibibytes=gibibytes,
        seconds=round(statistics.median(own), 3),
        torch_save_fsync_seconds=round(statistics.median(torchs), 3),
        ratio=round(
            statistics.median(a / b for a, b in zip(own, torchs, strict=True)), 3
        ),
        load_without_checksum_seconds=round(load, 3),
        rounds=num_rounds,
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    """Load a state's file as anybody can."""
    values: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return values


if __name__ == "__main__":
    main()
