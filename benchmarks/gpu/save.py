"""Measure what a save costs the steps of one process on a GPU; JSON lines.

    python benchmarks/gpu/save.py [--gibibytes 1 8]

A step multiplies matrices for some milliseconds; beside it lies the state. elasticrun
saves at a boundary, DCP by `async_save` with a stager that it uses again. `blocked` is
by how much the turn of a save is longer than a quiet one; the first save, which makes
its buffers, stands apart. `in_flight` is how long turns take while a save is written,
as a ratio to quiet ones, in the mean.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import TensorDataset

import elasticrun as er
from elasticrun.testing import run_generation

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

NUM_SAVES, NUM_QUIET = 3, 50  # Quiet turns before each save.
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
WIDTH = 8192 if IS_CUDA else 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gibibytes", type=float, nargs="+", default=[1.0, 8.0])
    for gibibytes in parser.parse_args().gibibytes:
        for way in (elastic, dcp_async):
            with tempfile.TemporaryDirectory() as folder:
                (found,) = run_generation(way, 1, gibibytes, folder, timeout=300)
            report("save on a GPU", way=way.__name__, gibibytes=gibibytes, **found)


def elastic(gibibytes: float, folder: str) -> dict[str, Any]:
    er.init(folder, save_interval="off", keep=1)
    er.register(state=state(gibibytes))
    data = TensorDataset(torch.zeros(10**7))
    loader, job = er.AdaptiveDataLoader(data, 1), er.current_job()

    def save() -> Callable[[], bool]:
        before = job.newest_checkpoint
        er.request_checkpoint()
        return lambda: job.newest_checkpoint is not before

    for _ in er.remaining_epochs_until(1):
        return measure(loader, save)
    raise AssertionError("no epoch began")


def dcp_async(gibibytes: float, folder: str) -> dict[str, Any]:
    # One process writes as well without a group; the stager pins what it copies to.
    values = state(gibibytes).state_dict()
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=IS_CUDA,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=IS_CUDA,
        )
    )
    numbers = itertools.count()

    def save() -> Callable[[], bool]:
        path = Path(folder, str(next(numbers)))
        future: Any = dcp.async_save(values, checkpoint_id=path, async_stager=stager)
        return lambda: bool(future.done())

    return measure(itertools.count(), save)


def state(gibibytes: float) -> nn.Module:
    rows = torch.zeros(16, int(gibibytes * 2**28 / 16), device=DEVICE)
    return nn.ParameterList(nn.Parameter(row.clone()) for row in rows)


def measure(
    turns: Iterable[object], save: Callable[[], Callable[[], bool]]
) -> dict[str, Any]:
    """Train and save by turns; return milliseconds of quiet turns, and what saves add.

    Args:
        save: Begins a save, in this turn or the next; it returns what tells whether
            the save is done.
    """
    matrix = torch.randn(WIDTH, WIDTH, device=DEVICE)
    quiet: list[float] = []
    in_flight: list[float] = []
    saving: list[float] = []
    is_done, num_quiet, last = (lambda: True), -1, 0.0
    for _ in turns:
        matrix @ matrix
        if IS_CUDA:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds, last = now - last, now
        if num_quiet < 0:  # This turn, or its beginning, had the save in it.
            saving.append(seconds)
            num_quiet = 0
        elif not is_done():
            in_flight.append(seconds)
        elif num_quiet < NUM_QUIET:
            quiet.append(seconds)
            num_quiet += 1
        elif len(saving) > NUM_SAVES:
            break
        else:
            is_done, num_quiet = save(), -1
    turn = statistics.median(quiet)
    blocked = [1000 * (seconds - turn) for seconds in saving[1:]]  # Not the first turn.
    return {
        "turn_ms": round(1000 * turn, 3),
        "first_blocked_ms": round(blocked[0], 1),
        "blocked_ms": round(statistics.median(blocked[1:]), 1),
        "in_flight": round(statistics.mean(in_flight) / turn, 3) if in_flight else None,
        "in_flight_median": (
            round(statistics.median(in_flight) / turn, 3) if in_flight else None
        ),
        "gpu": torch.cuda.get_device_name() if IS_CUDA else None,
    }


if __name__ == "__main__":
    main()
