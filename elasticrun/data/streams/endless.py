"""`Endless`: streams of unknown length, read again and again without an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.lanes import dealt
from elasticrun.data.order.permutation import Permutation
from elasticrun.data.streams.index import Contents
from elasticrun.data.streams.iterables import streams_of
from elasticrun.data.streams.learned import LearnedLengths
from elasticrun.data.streams.streams import Streams
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import current_job
from elasticrun.logger import Logger

logger = Logger(__name__)

_NO_END = 1 << 40  # Samples that a lane has.
_UNEVEN = 1.2  # The largest lane over the smallest, from which on it is told.


class Endless(Streams):
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
        given: Any = streams
        if isinstance(given, IterableDataset):
            given = streams_of(given)
        if not (isinstance(given, Streams) and given.has_end):
            raise TypeError(
                f"Endless takes streams that have an end, not {type(given).__name__}. "
                "Give TextLines, another of Streams, or an IterableDataset; Mixed goes "
                "on without end by itself."
            )
        self._streams = given
        self._learned = LearnedLengths(self._streams, name)
        options = self._streams.options()
        self._lanes_of = self._dealt(options["lanes"])
        num_lanes = len(self._lanes_of)
        super().__init__(
            [f"lane {lane}" for lane in range(num_lanes)],
            lanes=num_lanes,
            window=options["window"],
            transform=self._streams.transform,
            lengths=[_NO_END] * num_lanes,
        )
        self._seed = seed

    @property
    def has_end(self) -> bool:
        return False

    @property
    def draws(self) -> bool:
        return self._streams.draws

    @property
    def identity(self) -> str:
        return f"{self._seed} {self._lanes_of} {self._streams.identity}"

    @property
    def beginning(self) -> str:
        return self._streams.beginning

    @property
    def contents(self) -> Contents:
        return self._streams.contents

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
                    return self._streams.names[each], left
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
                    f"{self._streams.names[stream]}. Give fewer lanes, or leave empty "
                    "streams out."
                )

    def _dealt(self, num_lanes: int) -> list[list[int]]:
        """Return the streams of each lane; say so if lanes are not of a size."""
        sizes = self._streams.sizes()
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
