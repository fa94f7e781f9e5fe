"""Averages over a loop."""

from __future__ import annotations

from elasticrun import Accumulator


class AverageMeter:
    """The average of a value over all samples of an epoch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.val = 0.0
        self.total = Accumulator()

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.total += {"sum": val * n, "count": n}

    @property
    def avg(self) -> float:
        with self.total.synchronized():
            return float(self.total["sum"] / self.total["count"])

    def __str__(self) -> str:
        return f"{self.name} {self.avg!r}"
