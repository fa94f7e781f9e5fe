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


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]
