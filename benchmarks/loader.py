"""Measure batches per second beside torch's DataLoader and torchdata's; JSON lines.

    python benchmarks/loader.py [--rounds 9] [--samples 64000]

The last lines compare with what a program does by itself with data in memory,
`x[order[k : k + 32]]`.

The loaders take turns within each round, and a ratio is that of two turns of one round;
quoted is the median. Above 1.00, elasticrun is the faster one. torchdata's
StatefulDataLoader takes a snapshot every step (its default); without torchdata its
figures are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from machine import report
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elasticrun import AdaptiveDataLoader

BATCH_SIZE = 32
NUM_FEATURES = 16


class Rows(Dataset[torch.Tensor]):
    """Rows of a matrix in memory, read a batch at a time."""

    def __init__(self, num_samples: int) -> None:
        self.rows = torch.randn(num_samples, NUM_FEATURES)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.rows[indices]


class RowsByTensor(Rows):
    """The same, asked for with a tensor."""

    def __getitems__(self, indices: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.rows[indices]


class ByHand:
    """The loop that a program writes itself over a matrix in memory."""

    def __init__(self, rows: torch.Tensor, batch_size: int) -> None:
        self.rows = rows
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(self.rows))
        for start in range(0, len(self.rows), self.batch_size):
            yield self.rows[order[start : start + self.batch_size]]


def unchanged(batch: Any) -> Any:
    """A collate function for batches that are tensors already."""
    return batch


def batches_per_second(loader: Iterable[Any]) -> float:
    """Return the speed of one loop, the start of workers included."""
    num_batches = 0
    begin = time.perf_counter()
    for _ in loader:
        num_batches += 1
    return num_batches / (time.perf_counter() - begin)


def make_loaders(dataset: Any, **arguments: Any) -> dict[str, Iterable[Any]]:
    """Return the loaders to compare, with the same arguments."""
    makers: dict[str, Callable[..., Iterable[Any]]] = {
        "elasticrun": AdaptiveDataLoader,
        "torch": DataLoader,
    }
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        pass
    else:
        makers["torchdata"] = StatefulDataLoader
    return {
        name: make(dataset, BATCH_SIZE, shuffle=True, **arguments)
        for name, make in makers.items()
    }


def compare(case: str, loaders: dict[str, Iterable[Any]], num_rounds: int) -> None:
    """Let the loaders take turns, and report medians and ratios."""
    rounds = []
    for number in range(num_rounds + 1):
        names = list(loaders) if number % 2 else list(loaders)[::-1]
        rounds.append({name: batches_per_second(loaders[name]) for name in names})
    rounds = rounds[1:]  # The first one warms up.
    report(
        "loader",
        case=case,
        batches_per_second={
            name: round(statistics.median(r[name] for r in rounds)) for name in loaders
        },
        ratio_to={
            name: round(statistics.median(r["elasticrun"] / r[name] for r in rounds), 3)
            for name in loaders
            if name != "elasticrun"
        },
        rounds=num_rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=64_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    items = TensorDataset(torch.randn(options.samples, NUM_FEATURES))
    rows = Rows(options.samples)
    for num_workers in (0, 2):
        for case, dataset, arguments in (
            ("__getitem__", items, {}),
            ("__getitems__", rows, {"collate_fn": unchanged}),
        ):
            loaders = make_loaders(dataset, num_workers=num_workers, **arguments)
            compare(f"{case}, {num_workers} workers", loaders, options.rounds)
    for batch_size in (BATCH_SIZE, 256):
        by_hand = ByHand(rows.rows, batch_size)
        for case, loader in (
            ("TensorDataset", AdaptiveDataLoader(items, batch_size, shuffle=True)),
            (
                "__getitems__ of a tensor",
                AdaptiveDataLoader(
                    RowsByTensor(options.samples),
                    batch_size,
                    shuffle=True,
                    collate_fn=unchanged,
                ),
            ),
        ):
            compare(
                f"in memory, {case}, batches of {batch_size}",
                {"elasticrun": loader, "by hand": by_hand},
                options.rounds,
            )


if __name__ == "__main__":
    main()
