"""`Uncounted`: one pass over streams of unknown length."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.order.lanes import Slots, window_in_lane
from elasticrun.data.order.permutation import MAX_INDEX, Permutation
from elasticrun.data.streams.iterables import streams_of
from elasticrun.data.streams.learned import LearnedLengths
from elasticrun.data.streams.stream_reader import StreamReader
from elasticrun.data.streams.streams import InLanes, Streams, transform_error
from elasticrun.data.workers.lanes import DRY

_BLOCK = 16  # Samples that are read at once, where they are not mixed.


class Uncounted(InLanes):
    """Streams that are not counted, for loops over one pass.

        for epoch in remaining_epochs_until(10):
            for batch in AdaptiveDataLoader(Uncounted(hugging_face_dataset), 64):
                ...

    Streams with `lengths="unknown"` are taken for this by a loader. A global batch is
    so many slots: slot p is for the next sample of lane p mod the number of lanes, and
    stays empty where that lane has none left. So batches near the end of a loop are
    smaller; it ends where no lane has a sample left. How many samples a batch has, all
    replicas tell each other while the batch before is trained with.

    Lengths are learned at the ends of streams, and kept beside the checkpoints. They
    change no batch; a resume without them reads what lies before in each lane.

    Args:
        streams: `Streams`, or an `IterableDataset`; its lanes, window and index are
            taken.
        name: Like that of `Endless`.

    Raises:
        TypeError: They have no end, or samples that are left out.
    """

    def __init__(
        self, streams: Streams | IterableDataset[Any], *, name: str | None = None
    ) -> None:
        given: Any = streams
        if isinstance(given, IterableDataset):
            given = streams_of(given)
        if not (isinstance(given, Streams) and given.has_end):
            raise TypeError(
                f"Uncounted takes streams that have an end, not "
                f"{type(given).__name__}. Give TextLines, another of Streams, or an "
                "IterableDataset."
            )
        if given.skip_broken:
            raise TypeError(
                "Uncounted takes no streams with skip_broken=True: broken samples are "
                "found while counting. Leave Uncounted out, or let transform return "
                "something for such samples."
            )
        self.streams = given
        self._learned = LearnedLengths(given, name)
        options = given.options()
        self._num_lanes = min(options["lanes"], len(given.names))
        self._window = window_in_lane(options["window"], self._num_lanes)
        self._is_shuffled = False
        self._key = -1  # Of the loop that is read.
        self._lanes: dict[int, _Lane] = {}
        self._padding: list[Any] = []

    @property
    def lanes(self) -> Slots:
        own = f"{self._num_lanes} {self._window} {self.streams.identity}"
        return Slots(self._num_lanes, zlib.crc32(own.encode()))

    @property
    def draws(self) -> bool:
        return self.streams.draws

    @property
    def beginning(self) -> str:
        return self.streams.beginning

    def __len__(self) -> int:
        need_lengths(self, "len()")
        raise AssertionError("unreachable")

    def place(self, index: int) -> tuple[str, int]:
        """Return the lane, and the number there."""
        number, lane = divmod(index % MAX_INDEX, self._num_lanes)
        return f"lane {lane}", number

    def apart(self, *, is_shuffled: bool) -> Uncounted:
        own = copy.copy(self)
        own._is_shuffled = is_shuffled
        own._lanes = {}
        return own

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples in slots, or `DRY` for those that are empty.

        Args:
            indices: The slots, and `MAX_INDEX` times the key of the loop.
        """
        key = indices[0] // MAX_INDEX if indices else self._key
        if key != self._key:
            self._key, self._lanes = key, {}
        lanes, offset, num_lanes = self._lanes, key * MAX_INDEX, self._num_lanes
        samples = []
        for index in indices:
            number, at = divmod(index - offset, num_lanes)
            lane = lanes.get(at) or self._new_lane(at)
            samples.append(lane.take(number))
        transform, place = self.streams.transform, 0
        if transform is not None:
            try:
                for place, read in enumerate(samples):
                    if read is not DRY:
                        samples[place] = transform(read)
            except Exception as error:
                name = self.describe(indices[place])
                raise transform_error(name, transform, error) from error
        return samples

    def padding(self) -> Any:
        """Return what stands in for a missing sample: the first one that there is."""
        if not self._padding:
            transform = self.streams.transform or (lambda read: read)
            with program_generators_kept():
                seed_generators(0)
                for stream in range(len(self.streams.names)):
                    for read in self.streams.open(stream, 0):
                        self._padding.append(transform(read))
                        return self._padding[0]
        return self._padding[0]

    def _new_lane(self, number: int) -> _Lane:
        num_streams, lane_key = len(self.streams.names), None
        deal = np.arange(num_streams)
        if self._is_shuffled:  # Each loop deals the streams to the lanes anew.
            lane_key = derive_seed(self._key, number)
            deal = Permutation(num_streams, self._key).take(deal)
        order = deal[number :: self._num_lanes].tolist()
        reader = StreamReader(
            f"lane {number}",
            MAX_INDEX,
            lambda first: self._learned.read(order, first),
            window=self._window,
            is_counted=False,
        )
        size = self._window if self._is_shuffled else _BLOCK
        lane = self._lanes[number] = _Lane(reader, size, shuffled_by=lane_key)
        return lane


class _Lane:
    """The samples of one lane in one loop, block after block."""

    def __init__(
        self, reader: StreamReader, size: int, *, shuffled_by: int | None
    ) -> None:
        self._reader = reader
        self._size = size
        self._shuffled_by = shuffled_by
        self._block = -1
        self._samples: list[Any] = []

    def take(self, number: int) -> Any:
        """Return a sample, or `DRY` if the lane has fewer."""
        block, place = divmod(number, self._size)
        if block != self._block:
            begin = block * self._size
            samples = self._reader.read_block(begin, begin + self._size)
            if self._shuffled_by is not None:
                key = derive_seed(self._shuffled_by, block)
                order = Permutation(len(samples), key).take(np.arange(len(samples)))
                samples = [samples[at] for at in order]
            self._block, self._samples = block, samples
        return self._samples[place] if place < len(self._samples) else DRY


def with_lanes(dataset: Any) -> Any:
    """Return what a loader reads: an `IterableDataset`'s streams, `Uncounted` ones."""
    if isinstance(dataset, IterableDataset):
        dataset = streams_of(dataset)
    if isinstance(dataset, Streams) and dataset.has_unknown_lengths:
        return Uncounted(dataset)
    return dataset


def need_lengths(dataset: Any, what: str) -> None:
    """Refuse what needs the lengths of a loader's streams."""
    if isinstance(dataset, Uncounted):
        raise TypeError(
            f"{what} needs to know how many samples there are, and "
            f"{type(dataset.streams).__name__} is read with unknown lengths. Leave "
            'lengths="unknown" (or Uncounted) out, and streams are counted once; or '
            "train by steps, on batches(n) of a loader over Endless(streams)."
        )
