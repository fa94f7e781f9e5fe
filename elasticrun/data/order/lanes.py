"""Deals streams to lanes: which sample of which stream is at each position.

1. Streams are cut into *blocks*, where they can be entered. A loop's key deals these to
   a fixed number of *lanes*, each of which is a row of blocks that are read one after
   another.
2. A *round* takes one sample of each lane that has one left. A loop's order is one
   round after another.
3. Between two *levels*, the lengths of lanes, rounds have the same lanes: so a search
   among the levels and a division give the lane of a position, and the number there.
4. The key mixes the numbers in each window of a lane. A search among the lane's blocks
   gives the sample.

Price: each loop sorts its blocks; a position costs two searches. A checkpoint holds
nothing about streams, where a shuffle buffer would be in it, or be filled again. Shares
are nearly even: at 64 lanes and batches of 64, the largest over the mean one is 1.03,
1.02 and 1.09 at 3, 5 and 7 replicas.
"""

from __future__ import annotations

import heapq
import zlib
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds, mix_each
from elasticrun.data.order.permutation import MAX_INDEX

_Numbers = NDArray[np.int64]

# Windows of all lanes that an order keeps: of the round that is read, and of the next.
_TABLES_KEPT = 2
_WIDEST = 1000  # Samples of a window in one lane.


class LanesOrder(Protocol):
    """From the positions of a loop to lanes, and to the numbers of samples."""

    @property
    def num_lanes(self) -> int: ...

    def __call__(self, positions: _Numbers, /) -> _Numbers:
        """Return the number of the sample at each position below the length."""
        ...

    def lane_of(self, positions: _Numbers, /) -> _Numbers:
        """Return the lane of each position below the length."""
        ...

    def num_alike(self, position: int, size: int, /) -> int:
        """Return how many batches of a size from a position on have like lanes.

        Batch for batch, sample j of them is of one lane. At least 1.
        """
        ...


class DealtLanes(Protocol):
    """Lanes, and the orders in which their samples come.

    Attributes:
        num_lanes: The most that an order has.
        checksum: Of all that orders depend on, beside a key.
    """

    num_lanes: int
    checksum: int

    def __len__(self) -> int: ...

    def order(self, key: int | None) -> LanesOrder:
        """Return the order that has a key; without one, that of the streams."""
        ...


class Blocks(NamedTuple):
    """The samples of all streams, cut where these can be entered.

    Attributes:
        begins: The number of each block's first sample, over all streams.
        are_entered: Whether each can be entered in its middle, too.
    """

    begins: _Numbers
    are_entered: NDArray[np.bool_]


class Lanes:
    """Streams of known lengths in a fixed number of lanes.

    Each shuffled order deals the blocks anew. In the streams' own order, and without
    blocks, a stream has its lane for good: the longest streams are dealt first, each to
    the lane that has the fewest samples (Graham, "Bounds on multiprocessing timing
    anomalies", 1969), so that lanes run dry at nearly the same time.

    Attributes:
        num_lanes: How many there are: fewer than asked for where there are fewer
            blocks with a sample.
        starts: The number of each stream's first sample, over all streams.
        window: Samples of a lane in a row that a shuffled order mixes.

    Args:
        num_lanes: The most lanes.
        window: Samples in the windows of all lanes together.
    """

    def __init__(
        self,
        lengths: _Numbers,
        num_lanes: int,
        *,
        window: int,
        blocks: Blocks | None = None,
    ) -> None:
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_streams = max(int(np.count_nonzero(lengths)), 1)
        self.blocks = blocks
        most = self.num_streams if blocks is None else len(blocks.begins)
        self._most_lanes = num_lanes
        self.num_lanes = max(min(num_lanes, most), 1)
        self.window = window_in_lane(window, self.num_lanes)
        begins = () if blocks is None else blocks.begins
        self.checksum = zlib.crc32(
            np.array([self.num_lanes, self.window, *lengths, *begins])
            .astype("<i8")
            .tobytes()
        )

    def __len__(self) -> int:
        """Return the samples of all streams."""
        return int(self.starts[-1])

    @cached_property
    def lane_of_stream(self) -> _Numbers:
        """The lane of each stream that is not cut into blocks."""
        return dealt(self.lengths, min(self._most_lanes, self.num_streams))

    def order(self, key: int | None) -> LaneOrder:
        """Return the order that has a key; without one, that of the streams."""
        return LaneOrder(self, key)


class UncountedLanes:
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

    def order(self, key: int | None) -> UncountedLanes:
        del key
        return self

    def __call__(self, positions: _Numbers) -> _Numbers:
        return positions


class LaneOrder:
    """The samples of all streams in the rounds of their lanes.

    With a key, blocks are dealt to lanes by it, lanes have their order in a round by
    it, and each window of a lane's samples is in an order of its own; the first window
    ends anywhere, so that windows lie elsewhere in each loop. A block that is longer
    than a window is entered anywhere where it is a lane's first one: what lies before
    comes last in the lane. Else lanes whose blocks are equally long would be in step,
    and two samples that met would often meet again.

    Attributes:
        num_lanes: Those that have a sample.
        totals: The samples of each lane.
    """

    def __init__(self, lanes: Lanes, key: int | None) -> None:
        self._lanes = lanes
        self._key = key
        if key is None or lanes.blocks is None:
            self._begins, lengths = lanes.starts[:-1], lanes.lengths
            lane_of = lanes.lane_of_stream
        else:
            self._begins = lanes.blocks.begins
            lengths = np.diff(self._begins, append=len(lanes))
            lane_of = _dealt_by(derive_seed(key, 3), lengths, lanes.num_lanes)
        within: NDArray[Any] = np.arange(len(lengths))
        if key is not None:
            within = derive_seeds(derive_seed(key, 0), within)
        # Lane by lane. NumPy sorts numbers of 16 bits without comparing them.
        narrow = np.min_scalar_type(lanes.num_lanes)
        self._row = np.lexsort((within, lane_of.astype(narrow)))
        self._ends = np.cumsum(lengths[self._row])
        self.totals = np.bincount(lane_of, weights=lengths).astype(np.int64)
        self.num_lanes = len(self.totals)
        self._bases = np.cumsum(self.totals) - self.totals
        in_round = np.arange(self.num_lanes)  # The lanes in their order in a round.
        # Where the first window, and the first block of each lane are entered.
        self._into_window = self._into_block = np.zeros_like(in_round)
        if key is not None:
            self._into_window = _draw(derive_seed(key, 4), lanes.window, in_round)
            in_round = np.argsort(derive_seeds(derive_seed(key, 6), in_round))
            if lanes.blocks is not None:
                first = self._row[np.searchsorted(self._ends, self._bases, "right")]
                turn = lanes.blocks.are_entered[first] & (lengths[first] > lanes.window)
                drawn = _draw(derive_seed(key, 5), lengths[first], np.arange(len(turn)))
                self._into_block = drawn * turn
        # Rounds between two levels have the same lanes: those that are longer.
        self._levels = np.unique(np.concatenate([[0], self.totals]))
        totals = self.totals[in_round]
        alive = [in_round[totals > level] for level in self._levels[:-1]]
        self._num_alive = np.array([len(each) for each in alive], np.int64)
        self._level_starts = np.concatenate(
            [[0], np.cumsum(self._num_alive * np.diff(self._levels))]
        ).astype(np.int64)
        # The lanes of a round at each level.
        self._lane_at = np.zeros((len(alive), self.num_lanes), np.int64)
        for level, own in enumerate(alive):
            self._lane_at[level, : len(own)] = own
        self._table = lru_cache(_TABLES_KEPT)(self._new_table)

    def __len__(self) -> int:
        return len(self._lanes)

    def __call__(self, positions: _Numbers) -> _Numbers:
        """Return the number of the sample at each position."""
        lanes, numbers = self.locate(positions)
        if self._key is not None:
            numbers = self._shuffled(lanes, numbers)
            numbers = (numbers + self._into_block[lanes]) % self.totals[lanes]
        # Each sample's number, lane by lane, and so the block that it is in.
        numbers = self._bases[lanes] + numbers
        at = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(at > 0, self._ends[at - 1], 0)
        samples: _Numbers = self._begins[self._row[at]] + numbers - before
        return samples

    def locate(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the lane of each position below the length, and its number there."""
        level = np.searchsorted(self._level_starts, positions, side="right") - 1
        rounds, turn = np.divmod(
            positions - self._level_starts[level], self._num_alive[level]
        )
        return self._lane_at[level, turn], self._levels[level] + rounds

    def lane_of(self, positions: _Numbers) -> _Numbers:
        """Return the lane of each position below the length."""
        return self.locate(positions)[0]

    def num_alike(self, position: int, size: int) -> int:
        """Return how many batches of a size from a position on have like lanes."""
        level = int(np.searchsorted(self._level_starts, position, side="right")) - 1
        if size % self._num_alive[level]:
            return 1
        return max(int(self._level_starts[level + 1] - position) // size, 1)

    def _shuffled(self, lanes: _Numbers, numbers: _Numbers) -> _Numbers:
        """Return the numbers within their lanes that stand where these ones stood."""
        shuffled = np.empty_like(numbers)
        into = self._into_window[lanes]
        windows, cells = np.divmod(numbers + into, self._lanes.window)
        for window in np.unique(windows):
            own = windows == window
            table = self._table(int(window))
            shuffled[own] = table[lanes[own], cells[own]]
        shuffled += windows * self._lanes.window - into
        return shuffled

    def _new_table(self, window: int) -> _Numbers:
        """Return, for each lane, its samples of a window in their keyed order."""
        assert self._key is not None
        begin = window * self._lanes.window - self._into_window[:, None]
        width = min(self._lanes.window, int((self.totals[:, None] - begin).max()))
        cells = np.arange(self.num_lanes * width).reshape(self.num_lanes, width)
        # Twice, as for any short permutation: see `Permutation`.
        words = derive_seeds(derive_seed(self._key, 1, window), cells)
        words ^= np.uint64(derive_seed(self._key, 2, window))
        words = mix_each(words)
        # What a lane does not have stays where it is, before and behind what it has.
        numbers = begin + np.arange(width)
        words[numbers < 0] = np.uint64(0)
        words[numbers >= self.totals[:, None]] = np.uint64(0xFFFFFFFFFFFFFFFF)
        return np.argsort(words, axis=1, kind="stable")


def window_in_lane(window: int, num_lanes: int) -> int:
    """Return the samples of one lane in a window over all of them."""
    return min(max(window // num_lanes, 1), _WIDEST)


def _draw(key: int, most: int | _Numbers, numbers: _Numbers) -> _Numbers:
    """Return a keyed number below `most` for each of some numbers."""
    words = derive_seeds(key, numbers) >> np.uint64(1)
    return words.astype(np.int64) % most


def _dealt_by(key: int, lengths: _Numbers, num_lanes: int) -> _Numbers:
    """Return the lane of each block: in rows of like length, each row in keyed order.

    So the totals of two lanes differ by the longest block at most.
    """
    numbers = np.arange(len(lengths))
    rows = np.lexsort((derive_seeds(derive_seed(key, 0), numbers), -lengths))
    cells = np.arange(-(-len(lengths) // num_lanes) * num_lanes)
    words = derive_seeds(derive_seed(key, 1), cells).reshape(-1, num_lanes)
    lane_of = np.empty_like(numbers)
    lane_of[rows] = np.argsort(words, axis=1).ravel()[: len(lengths)]
    return lane_of


def dealt(sizes: _Numbers, num_lanes: int) -> _Numbers:
    """Return the lane of each stream, so that lanes are of nearly equal size."""
    lane_of_stream = np.zeros(len(sizes), np.int64)
    lanes = [(0, lane) for lane in range(num_lanes)]
    for stream in np.argsort(-sizes, kind="stable"):
        total, lane = lanes[0]
        lane_of_stream[stream] = lane
        heapq.heapreplace(lanes, (total + int(sizes[stream]), lane))
    return lane_of_stream
