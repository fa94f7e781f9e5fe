"""Streams that are not counted: one pass over them, or passes without end."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.order.lanes import UncountedLanes, dealt, window_in_lane
from elasticrun.data.order.permutation import MAX_INDEX, Permutation
from elasticrun.data.streams.in_lanes import InLanes
from elasticrun.data.streams.index import Contents, Index, Scan, stamp_of
from elasticrun.data.streams.iterables import streams_of, with_end
from elasticrun.data.streams.stream_reader import StreamReader
from elasticrun.data.streams.streams import Streams, index_in, transform_error
from elasticrun.data.workers.lanes import EXHAUSTED
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import current_job
from elasticrun.logger import Logger

logger = Logger(__name__)

_BLOCK = 16  # Samples that are read at once, where they are not mixed.
_NO_END = 1 << 40  # Samples that a lane has.
_UNEVEN = 1.2  # The largest lane over the smallest, from which on it is told.


class _LearnedLengths:
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


class _OverStreams(InLanes):
    """A data set that tells of itself what its streams do, and does not count them."""

    streams: Streams

    @property
    def draws(self) -> bool:
        return self.streams.draws

    @property
    def beginning(self) -> str:
        return self.streams.beginning

    @property
    def contents(self) -> Contents:
        return self.streams.contents


class Uncounted(_OverStreams):
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
        given = with_end(streams, "Uncounted")
        if given.skip_broken:
            raise TypeError(
                "Uncounted takes no streams with skip_broken=True: broken samples are "
                "found while counting. Leave Uncounted out, or let transform return "
                "something for such samples."
            )
        self.streams = given
        self._learned = _LearnedLengths(given, name)
        options = given.options()
        self._num_lanes = min(options["lanes"], len(given.names))
        self._window = window_in_lane(options["window"], self._num_lanes)
        self._is_shuffled = False
        self._key = -1  # Of the loop that is read.
        self._lanes: dict[int, _Lane] = {}
        self._padding: list[Any] = []

    @property
    def lanes(self) -> UncountedLanes:
        own = f"{self._num_lanes} {self._window} {self.streams.identity}"
        return UncountedLanes(self._num_lanes, zlib.crc32(own.encode()))

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
        """Return the samples in slots, or `EXHAUSTED` for those that are empty.

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
                    if read is not EXHAUSTED:
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
        """Return a sample, or `EXHAUSTED` if the lane has fewer."""
        block, place = divmod(number, self._size)
        if block != self._block:
            begin = block * self._size
            samples = self._reader.read_block(begin, begin + self._size)
            if self._shuffled_by is not None:
                key = derive_seed(self._shuffled_by, block)
                order = Permutation(len(samples), key).take(np.arange(len(samples)))
                samples = [samples[at] for at in order]
            self._block, self._samples = block, samples
        return self._samples[place] if place < len(self._samples) else EXHAUSTED


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


class Endless(_OverStreams, Streams):
    """Streams that are not counted, for `batches`: each lane goes on without end.

        train = AdaptiveDataLoader(Endless(hugging_face_dataset), 64, shuffle=True)
        for batch in train.batches(100_000):
            ...

    The streams are dealt to the lanes by the sizes of their files, the empty ones left
    out. A lane reads its streams one after another, each pass in another order, and
    begins again when all are read; lanes come to their ends at different times. Where a
    lane is, is its number of samples; how long streams are is learned at their ends,
    and kept beside the checkpoints. A resume reads the stream that each lane is in from
    its beginning; where no lengths are kept, all streams before it, too.

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
        self.streams = with_end(
            streams, "Endless", else_="; Mixed goes on without end by itself"
        )
        self._learned = _LearnedLengths(self.streams, name)
        options = self.streams.options()
        self._lanes_of = self._dealt(options["lanes"])
        num_lanes = len(self._lanes_of)
        super().__init__(
            [f"lane {lane}" for lane in range(num_lanes)],
            lanes=num_lanes,
            window=options["window"],
            transform=self.streams.transform,
            lengths=[_NO_END] * num_lanes,
        )
        self._seed = seed

    @property
    def has_end(self) -> bool:
        return False

    @property
    def identity(self) -> str:
        return f"{self._seed} {self._lanes_of} {self.streams.identity}"

    def place(self, index: int) -> tuple[str, int]:
        """Return the stream and the number; of what is not known here, the lane's."""
        lane, number = divmod(index, _NO_END)
        number_of_pass, left = 0, number
        while True:
            for each in self._order(lane, number_of_pass):
                length = self._learned.length(each)
                if length is None and each not in self._learned.begun:
                    return self.names[lane], number
                if length is None or left < length:
                    return self.streams.names[each], left
                left -= length
            number_of_pass += 1

    def open(self, stream: int, first: int) -> Iterator[Any]:
        """Return an iterator over a lane's samples from number `first` on."""
        for number in itertools.count():
            order = self._order(stream, number)
            num_passed = yield from self._learned.read(order, first)
            first = max(first - num_passed, 0)
            if num_passed == 0:
                raise ElasticRunError(
                    f"lane {stream} has no sample in any of its streams, such as "
                    f"{self.streams.names[stream]}. Give fewer lanes, or leave empty "
                    "streams out."
                )

    def _dealt(self, num_lanes: int) -> list[list[int]]:
        """Return the streams of each lane; say so if lanes are not of a size."""
        sizes = self.streams.sizes()
        streams = np.flatnonzero(sizes)
        if not len(streams):
            raise ValueError(
                f"all {len(sizes)} streams of Endless are empty files, so no loop over "
                "them can deliver anything. Look at the paths that were given."
            )
        sizes = sizes[streams]
        num_lanes = min(num_lanes, len(streams))
        lane_of = dealt(sizes, num_lanes)
        if (
            uneven := _unevenness(sizes, lane_of)
        ) > _UNEVEN and current_job().rank == 0:
            even = next(
                number
                for number in range(num_lanes, 0, -1)
                if _unevenness(sizes, dealt(sizes, number)) <= _UNEVEN
            )
            logger.warning(
                "Endless: one of %d lanes has %.1f times the bytes of another, so its "
                "samples are drawn so much less often. Cut the data into files of "
                "similar size, or give lanes=%d, which are nearly even.",
                num_lanes,
                uneven,
                even,
            )
        return [streams[lane_of == lane].tolist() for lane in range(num_lanes)]

    def _order(self, lane: int, number: int) -> list[int]:
        """Return the streams of a lane in the order of one of its passes."""
        own = self._lanes_of[lane]
        if self._seed is None:
            return own
        key = derive_seed(self._seed, lane, number)
        return [own[at] for at in Permutation(len(own), key).take(np.arange(len(own)))]


def _unevenness(sizes: NDArray[np.int64], lane_of: NDArray[np.int64]) -> float:
    """Return the size of the largest lane over that of the smallest."""
    totals = np.bincount(lane_of, weights=sizes)
    return float(totals.max() / totals.min())
