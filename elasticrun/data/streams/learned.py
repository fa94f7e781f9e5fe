"""Lengths of streams that were not counted, learned when a stream ends."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from elasticrun.data.streams.index import Index, Scan, stamp_of
from elasticrun.data.streams.streams import Streams, index_in


class LearnedLengths:
    """Reads streams one after another, from any number on.

    What is learned of lengths spares reading what lies before, and is kept beside the
    checkpoints.

    Attributes:
        begun: Streams that were opened in this process.

    Args:
        name: What lengths are kept under; None for how the streams are counted.
    """

    def __init__(self, streams: Streams, name: str | None) -> None:
        self._streams = streams
        self.begun: set[int] = set()
        self._lengths: dict[int, int] = {}
        kind = name or streams.kind
        self._index: Index | None = None
        if kind is not None:
            self._index = index_in(streams.options()["index"], f"Endless {kind}")

    def read(self, order: list[int], first: int) -> Generator[Any, None, int]:
        """Yield the samples of streams, from a number on; return how many they have."""
        num_passed = 0
        for stream in order:
            length = self.length(stream)
            begin = max(first - num_passed, 0)
            if length is not None and begin >= length:
                num_passed += length
                continue
            count = opened = 0 if length is None else begin
            self.begun.add(stream)
            for sample in self._streams.without_broken(stream, opened):
                count += 1
                if count > begin:
                    yield sample
            num_passed += count
            self._learn(stream, count)
        return num_passed

    def length(self, stream: int) -> int | None:
        """Return how long a stream is, if a replica has ever come to its end."""
        if stream not in self._lengths and self._index is not None:
            kept = self._index.find(*self._key(stream))
            if kept is not None:
                self._lengths[stream] = kept.length
        return self._lengths.get(stream)

    def _learn(self, stream: int, length: int) -> None:
        if stream not in self._lengths and self._index is not None:
            self._index.add(*self._key(stream), Scan(length))
        self._lengths[stream] = length

    def _key(self, stream: int) -> tuple[str, str]:
        name = self._streams.names[stream]
        return name, stamp_of(name)
