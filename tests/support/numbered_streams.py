"""Streams of numbers in memory, and what loops over them deliver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from elasticrun import (
    Streams,
)

LENGTHS = (30, 0, 7, 41, 12)


class Numbers(Streams):
    """Streams of numbers, one after another over all of them."""

    def __init__(self, *lengths: int, **options: Any) -> None:
        names = [f"stream {number}" for number in range(len(lengths))]
        super().__init__(names, lengths=lengths, **options)
        self.begins = [0, *itertools.accumulate(lengths)]
        self.opened: list[tuple[int, int]] = []

    def open(self, stream: int, first: int) -> Iterator[int]:
        self.opened.append((stream, first))
        return iter(range(self.begins[stream] + first, self.begins[stream + 1]))


class Cut(Numbers):
    """Such as can be entered anywhere, and are read in blocks."""

    block = 6


class Unknown(Numbers):
    """Streams whose lengths nobody is to ask for."""

    def __init__(self, *lengths: int, **options: Any) -> None:
        super().__init__(*lengths, **options)
        self._scans = None
        self.has_unknown_lengths = True

    def scan_all(self) -> Any:
        raise AssertionError("they were counted")


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]
