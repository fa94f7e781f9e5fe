"""Measure the speed and the quality of the shuffled order; one JSON line each.

    python benchmarks/permutation.py

`indices_per_second` is for a slice from the middle of the order, `randperm_per_second`
for `torch.randperm` of the whole length on the same cores, where it fits into memory.
`batch_microseconds` is one call for 32 indices. A quality figure stands beside what a
uniform shuffle gives on average, in brackets its standard deviation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from machine import report
from numpy.typing import NDArray

from elasticrun.data.order.permutation import Permutation

LENGTHS = [10**4, 10**7, 10**9, 10**12]
MAX_RANDPERM_LENGTH = 10**7
NUM_TIMED = 10**6
NUM_KEYS = 50


def main() -> None:
    for length in LENGTHS:
        report("permutation-speed", **speed(length))
    for length in (4000, 5000, 100_003):
        report("permutation-quality", **quality(length))


def seconds(call: Callable[[], object], *, num_repeats: int = 5) -> float:
    """Return the shortest time that the call took."""
    shortest = float("inf")
    for _ in range(num_repeats):
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def speed(length: int) -> dict[str, object]:
    order = Permutation(length, 1)
    num_timed = min(length, NUM_TIMED)
    start = (length - num_timed) // 2
    rate = num_timed / seconds(lambda: order.take(np.arange(start, start + num_timed)))
    batch = seconds(lambda: order.take(np.arange(start, start + 32)), num_repeats=200)
    randperm_rate = None
    if length <= MAX_RANDPERM_LENGTH:
        randperm_rate = length / seconds(lambda: torch.randperm(length))
    return {
        "length": length,
        "indices_per_second": round(rate),
        "batch_microseconds": round(batch * 1e6, 1),
        "construction_microseconds": round(
            seconds(lambda: Permutation(length, 1), num_repeats=50) * 1e6, 1
        ),
        "randperm_per_second": None if randperm_rate is None else round(randperm_rate),
        "randperm_bytes": 8 * length,
    }


def quality(length: int) -> dict[str, object]:
    orders = [
        Permutation(length, key).take(np.arange(length)) for key in range(NUM_KEYS)
    ]
    positions = np.arange(length)
    fixed = [int(np.sum(order == positions)) for order in orders]
    distances = [
        float(np.mean(np.abs(order - other))) / length
        for order, other in itertools.pairwise(orders)
    ]
    return {
        "length": length,
        "keys": NUM_KEYS,
        "chi_squared_of_32x32_cells": summary([chi_squared(o) for o in orders]),
        "chi_squared_of_32x32_cells_expected": "961 (44)",
        "serial_correlation_times_root_length": summary(
            [float(np.corrcoef(o[1:], o[:-1])[0, 1]) * length**0.5 for o in orders]
        ),
        "serial_correlation_times_root_length_expected": "0 (1)",
        "fixed_points": summary(fixed),
        "fixed_points_expected": "1 (1)",
        "distance_between_adjacent_keys": round(float(np.mean(distances)), 4),
        "distance_between_adjacent_keys_expected": 0.3333,
    }


def chi_squared(order: NDArray[np.int64]) -> float:
    """Return how unevenly the values are spread over a board of position and value."""
    counts, _, _ = np.histogram2d(np.arange(len(order)), order, bins=32)
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / len(order)
    return float(((counts - expected) ** 2 / expected).sum())


def summary(figures: list[float] | list[int]) -> str:
    """Return mean and standard deviation over the keys."""
    return f"{np.mean(figures):.3g} ({np.std(figures):.2g})"


if __name__ == "__main__":
    main()
