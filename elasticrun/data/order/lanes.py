"""Deals streams to lanes: which sample of which stream is at each position.

A *lane* is a row of streams that are read one after another. A *round* takes one sample
of each lane that has one left, in the lanes' order; the samples' order is one round
after another. So the lengths of the lanes alone say which lane a position is in, and a
checkpoint holds nothing about streams.
"""

from __future__ import annotations

import heapq
import zlib
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds, mix_each
from elasticrun.data.order.batches import MAX_INDEX

_Numbers = NDArray[np.int64]

# Windows of all lanes that an order keeps: of the round that is read, and of the next.
_TABLES_KEPT = 2


class PositionOrder(Protocol):
    """From positions to the numbers of samples."""

    def take(self, positions: _Numbers, /) -> _Numbers: ...


class DealtLanes(Protocol):
    """Which lane each position is in, in every loop, and orders that keep to it.

    Attributes:
        checksum: Of all that lanes and orders depend on, beside a key.
    """

    num_lanes: int
    checksum: int

    def __len__(self) -> int: ...

    def lane_of(self, positions: _Numbers) -> _Numbers:
        """Return the lane of each position below the length."""
        ...

    def num_alike(self, position: int, size: int) -> int:
        """Return how many batches of a size from a position on have like lanes.

        Batch for batch, sample j of them is of one lane. At least 1.
        """
        ...

    def order(self, key: int | None) -> PositionOrder:
        """Return the order that has a key; without one, that of the streams."""
        ...


class LanesAsSampler:
    """The order of each loop over lanes: another one for each key, if shuffled."""

    def __init__(self, lanes: DealtLanes, *, shuffle: bool) -> None:
        self._lanes = lanes
        self._shuffle = shuffle
        self.checksum = lanes.checksum

    def __len__(self) -> int:
        return len(self._lanes)

    def keyed(self, key: int) -> PositionOrder:
        """Return the order of the loop that has a key."""
        return self._lanes.order(key if self._shuffle else None)


class Lanes:
    """Streams of known lengths in a fixed number of lanes.

    A stream has its lane for good: the longest streams are dealt first, each to the
    lane that has the fewest samples (Graham, "Bounds on multiprocessing timing
    anomalies", 1969), so that lanes run dry at nearly the same time.

    Attributes:
        num_lanes: How many there are: fewer than asked for where there are fewer
            streams with a sample.
        lane_of_stream: The lane of each stream.
        starts: The number of each stream's first sample, over all streams.

    Args:
        num_lanes: The most lanes.
        window: Samples of a lane in a row that a shuffled order mixes.
    """

    def __init__(self, lengths: _Numbers, num_lanes: int, *, window: int) -> None:
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_lanes = min(num_lanes, max(int(np.count_nonzero(lengths)), 1))
        self.window = window
        self.lane_of_stream = _dealt(lengths, self.num_lanes)
        self.totals = np.bincount(
            self.lane_of_stream, weights=lengths, minlength=self.num_lanes
        ).astype(np.int64)
        # Rounds between two levels have the same lanes: those that are longer.
        self._levels = np.unique(np.concatenate([[0], self.totals]))
        self._alive = [
            np.flatnonzero(self.totals > level) for level in self._levels[:-1]
        ]
        counts = [len(lanes) for lanes in self._alive]
        self._level_starts = np.concatenate(
            [[0], np.cumsum(np.asarray(counts, np.int64) * np.diff(self._levels))]
        ).astype(np.int64)
        # For each level and place in a round, the lane there.
        self._lane_at = np.zeros((len(counts), self.num_lanes), np.int64)
        for level, lanes in enumerate(self._alive):
            self._lane_at[level, : len(lanes)] = lanes
        self._num_alive = np.asarray(counts, np.int64)
        self.checksum = zlib.crc32(
            np.array([self.num_lanes, window, *lengths]).astype("<i8").tobytes()
        )

    def __len__(self) -> int:
        """Return the samples of all streams."""
        return int(self.starts[-1])

    def locate(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the lane of each position below the length, and its number there."""
        level = np.searchsorted(self._level_starts, positions, side="right") - 1
        rounds, place = np.divmod(
            positions - self._level_starts[level], self._num_alive[level]
        )
        return self._lane_at[level, place], self._levels[level] + rounds

    def lane_of(self, positions: _Numbers) -> _Numbers:
        """Return the lane of each position below the length."""
        return self.locate(positions)[0]

    def num_alike(self, position: int, size: int) -> int:
        """Return how many batches of a size from a position on have like lanes."""
        level = int(np.searchsorted(self._level_starts, position, side="right")) - 1
        if size % len(self._alive[level]):
            return 1
        return max(int(self._level_starts[level + 1] - position) // size, 1)

    def order(self, key: int | None) -> LaneOrder:
        """Return the order that has a key; without one, that of the streams."""
        return LaneOrder(self, key)


class Slots:
    """Places for samples of lanes whose lengths nobody knows: one a lane in each round.

    They are their own order, and have no end.
    """

    def __init__(self, num_lanes: int, checksum: int) -> None:
        self.num_lanes = num_lanes
        self.checksum = checksum

    def __len__(self) -> int:
        return MAX_INDEX

    def lane_of(self, positions: _Numbers) -> _Numbers:
        return positions % self.num_lanes

    def num_alike(self, position: int, size: int) -> int:
        del position
        return 1 if size % self.num_lanes else MAX_INDEX

    def order(self, key: int | None) -> Slots:
        del key
        return self

    def take(self, positions: _Numbers) -> _Numbers:
        return positions


class LaneOrder:
    """The samples of all streams in the rounds of their lanes.

    With a key, a lane's streams come in a keyed order, and each window of its samples
    in another one. Samples are numbered over all streams, in the streams' own order.
    """

    def __init__(self, lanes: Lanes, key: int | None) -> None:
        self._lanes = lanes
        self._key = key
        lane_of = lanes.lane_of_stream
        within: NDArray[Any] = np.arange(len(lane_of))
        if key is not None:
            within = derive_seeds(derive_seed(key, 0), within)
        self._streams = np.lexsort((within, lane_of))  # Lane by lane.
        self._ends = np.cumsum(lanes.lengths[self._streams])
        self._bases = np.cumsum(lanes.totals) - lanes.totals
        self._table = lru_cache(_TABLES_KEPT)(self._new_table)

    def __len__(self) -> int:
        return len(self._lanes)

    def take(self, positions: _Numbers) -> _Numbers:
        """Return the number of the sample at each position."""
        lanes, numbers = self._lanes.locate(positions)
        if self._key is not None:
            numbers = self._shuffled(lanes, numbers)
        places = self._bases[lanes] + numbers
        at = np.searchsorted(self._ends, places, side="right")
        streams = self._streams[at]
        begins = self._ends[at] - self._lanes.lengths[streams]
        samples: _Numbers = self._lanes.starts[streams] + places - begins
        return samples

    def _shuffled(self, lanes: _Numbers, numbers: _Numbers) -> _Numbers:
        """Return the numbers within their lanes that stand where these ones stood."""
        shuffled = np.empty_like(numbers)
        windows, places = np.divmod(numbers, self._lanes.window)
        for window in np.unique(windows):
            own = windows == window
            table = self._table(int(window))
            shuffled[own] = table[lanes[own], places[own]]
        shuffled += windows * self._lanes.window
        return shuffled

    def _new_table(self, window: int) -> _Numbers:
        """Return, for each lane, its samples of a window in their keyed order."""
        lanes = self._lanes
        assert self._key is not None
        begin = window * lanes.window
        width = min(lanes.window, int(lanes.totals.max()) - begin)
        cells = np.arange(lanes.num_lanes * width).reshape(lanes.num_lanes, width)
        # Twice, as for any short permutation: see `Permutation`.
        words = derive_seeds(derive_seed(self._key, 1, window), cells)
        words ^= np.uint64(derive_seed(self._key, 2, window))
        words = mix_each(words)
        # What a lane does not have comes last.
        beyond = np.arange(width) >= (lanes.totals - begin)[:, None]
        words[beyond] = np.uint64(0xFFFFFFFFFFFFFFFF)
        return np.argsort(words, axis=1, kind="stable")


def _dealt(lengths: _Numbers, num_lanes: int) -> _Numbers:
    """Return the lane of each stream."""
    lane_of_stream = np.zeros(len(lengths), np.int64)
    lanes = [(0, lane) for lane in range(num_lanes)]
    for stream in np.argsort(-lengths, kind="stable"):
        total, lane = lanes[0]
        lane_of_stream[stream] = lane
        heapq.heapreplace(lanes, (total + int(lengths[stream]), lane))
    return lane_of_stream
