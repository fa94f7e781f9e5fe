"""`Endless`: streams whose lengths nobody knows, read in passes that never end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.permutation import Permutation
from elasticrun.data.streams.index import Scan, Stream, read_scan, stamp_of, write_scan
from elasticrun.data.streams.iterables import streams_of
from elasticrun.data.streams.streams import Streams, directory_of
from elasticrun.errors import ElasticRunError

_NO_END = 1 << 40  # Samples that a lane has.


class Endless(Streams):
    """Streams that are not counted, for `batches`: each lane goes on for ever.

        train = AdaptiveDataLoader(Endless(hugging_face_dataset), 64, shuffle=True)
        for batch in train.batches(100_000):
            ...

    A lane reads its streams one after another, each pass in another order, and begins
    again when all are read; lanes come to their ends at different times. Where a lane
    is, is its number of samples; how long streams are is learned at their ends, and
    kept beside the checkpoints. A resume reads the stream that each lane is in from its
    beginning; where no lengths are kept, all streams before it, too.

    Args:
        streams: `Streams`, or an `IterableDataset`; its lanes, window and index are
            taken.
        seed: What the order of each pass depends on; None for the streams' own order.
        name: What lengths are kept under. An `IterableDataset` needs one for that, and
            another one whenever it changes.

    Raises:
        ElasticRunError: While it is read: a lane has no sample at all.
    """

    def __init__(
        self,
        streams: Streams | IterableDataset[Any],
        *,
        seed: int | None = 0,
        name: str | None = None,
    ) -> None:
        self._streams = streams if isinstance(streams, Streams) else streams_of(streams)
        options = self._streams.options()
        num_lanes = min(options["lanes"], len(options["names"]))
        super().__init__(
            [f"lane {lane}" for lane in range(num_lanes)],
            lanes=num_lanes,
            window=options["window"],
            transform=self._streams.transform,
            lengths=[_NO_END] * num_lanes,
        )
        self._seed = seed
        self._learned: dict[int, int] = {}  # Lengths of streams.
        self._begun: set[int] = set()  # Streams that were opened in this process.
        kind = name or self._streams.kind
        self._kept_as = f"Endless {kind}"
        self._kept_in = None if kind is None else directory_of(options["index"])

    @property
    def has_end(self) -> bool:
        return False

    @property
    def draws(self) -> bool:
        return self._streams.draws

    @property
    def identity(self) -> str:
        return f"{self._seed} {self._streams.identity}"

    @property
    def beginning(self) -> str:
        return self._streams.beginning

    def place(self, index: int) -> tuple[str, int]:
        """Return the stream and the number; of what is not known here, the lane's."""
        lane, number = divmod(index, _NO_END)
        number_of_pass, left = 0, number
        while True:
            for each in self._order(lane, number_of_pass):
                length = self._length(each)
                if length is None and each not in self._begun:
                    return self.names[lane], number
                if length is None or left < length:
                    return self._streams.names[each], left
                left -= length
            number_of_pass += 1

    def open(self, stream: int, first: int) -> Iterator[Any]:
        """Return an iterator over a lane's samples from number `first` on."""
        for number in itertools.count():
            num_passed = 0
            for each in self._order(stream, number):
                length = self._length(each)
                if length is not None and first >= length:
                    first, num_passed = first - length, num_passed + length
                    continue
                begin = 0 if length is None else first
                count = begin
                self._begun.add(each)
                for sample in self._streams.without_broken(each, begin):
                    count += 1
                    if count > first:
                        yield sample
                first, num_passed = max(first - count, 0), num_passed + count
                self._learn(each, count)
            if num_passed == 0:
                raise ElasticRunError(
                    f"lane {stream} has no sample in any of its streams, such as "
                    f"{self._streams.names[stream]}. Give fewer lanes, or leave empty "
                    "streams out."
                )

    def _order(self, lane: int, number: int) -> list[int]:
        """Return the streams of a lane in the order of one of its passes."""
        own = np.arange(lane, len(self._streams.names), len(self.names))
        if self._seed is not None:
            key = derive_seed(self._seed, lane, number)
            own = own[Permutation(len(own), key).take(np.arange(len(own)))]
        return own.tolist()

    def _length(self, stream: int) -> int | None:
        """Return how long a stream is, if a replica has ever come to its end."""
        if stream not in self._learned and self._kept_in is not None:
            kept = read_scan(self._kept_in, self._as_kept(stream))
            if kept is not None:
                self._learned[stream] = kept.length
        return self._learned.get(stream)

    def _learn(self, stream: int, length: int) -> None:
        if stream not in self._learned and self._kept_in is not None:
            self._kept_in.mkdir(parents=True, exist_ok=True)
            write_scan(self._kept_in, self._as_kept(stream), Scan(length))
        self._learned[stream] = length

    def _as_kept(self, stream: int) -> Stream:
        name = self._streams.names[stream]
        return Stream(self._kept_as, name, stamp_of(name))
