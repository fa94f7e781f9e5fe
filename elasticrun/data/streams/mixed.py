"""`Mixed`: mixes several data sets in exact proportions."""

from __future__ import annotations

import copy
import itertools
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import inf
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.batches import Passes, check_size
from elasticrun.data.order.permutation import MAX_INDEX, Order, Permutation
from elasticrun.data.streams.in_lanes import InLanes
from elasticrun.data.streams.index import Contents
from elasticrun.data.streams.iterables import streams_of

_Numbers = NDArray[np.int64]
_Weights = Mapping[Any, float]

_MAP_LANES = 64  # Of a map-style source, which any replica can read.


class Mixed(InLanes):
    """Samples of several datasets by weights, in exact shares.

        mix = Mixed({"web": web, "books": books}, {"web": 3, "books": 1})
        train = AdaptiveDataLoader(mix, 64, shuffle=True)
        for batch in train.batches(100_000):
            ...

    Every source has its share of each `block` samples in a row, at places that are
    drawn anew for each block. A source continues from block to block. When it has been
    read through, its next pass begins, in another order. `train.sources` names
    the source of each sample of the current batch.

    Args:
        sources: Data sets, map-style or in streams.
        weights: Of each source; or a plan of them, from samples seen (of the loop) to
            weights: {0: {"web": 1, "books": 1}, 500_000: {"web": 1, "books": 3}}. A
            change comes at the end of a block.
        num_samples: In one loop over the loader; without it there is no end, and only
            `batches` can be looped over.
        block: Samples in which shares are exact to one sample.
    """

    def __init__(
        self,
        sources: Mapping[Any, Any],
        weights: _Weights | Mapping[int, _Weights],
        *,
        num_samples: int | None = None,
        block: int = 1000,
    ) -> None:
        given: tuple[Any, ...] = (sources, weights)
        if not all(isinstance(each, Mapping) for each in given):
            raise TypeError(
                "Mixed takes dictionaries from keys to data sets and to weights, not "
                f"{type(sources).__name__} and {type(weights).__name__}: "
                'Mixed({"web": web, "books": books}, {"web": 3, "books": 1}).'
            )
        if not sources:
            raise ValueError("Mixed has no sources. Give one or more data sets.")
        self.sources = {
            key: streams_of(source) if isinstance(source, IterableDataset) else source
            for key, source in sources.items()
        }
        self._plan = _checked_plan(list(self.sources), weights)
        self._num_samples = num_samples
        if num_samples is not None:
            check_size("num_samples", num_samples)
        self._block = check_size("block", block)

    @property
    def has_end(self) -> bool:
        return self._num_samples is not None

    @cached_property
    def lanes(self) -> MixedLanes:
        """How its samples are dealt to lanes; counts those of its sources."""
        return MixedLanes(
            list(self.sources.values()), self._plan, self._block, self._num_samples
        )

    def prepare(self, rank: int, world_size: int) -> None:
        first_lanes = self.lanes.first_lanes
        for source, first in zip(self.sources.values(), first_lanes, strict=False):
            if isinstance(source, InLanes):
                source.prepare((rank - int(first)) % world_size, world_size)

    def source_of(self, index: int) -> Any:
        """Return the key of the source that a sample is of."""
        return list(self.sources)[self._number_of(index)]

    @property
    def draws(self) -> bool:
        sources = self.sources.values()
        return any(s.draws if isinstance(s, InLanes) else True for s in sources)

    @property
    def beginning(self) -> str:
        own = [s.beginning for s in self.sources.values() if isinstance(s, InLanes)]
        return "; ".join(filter(None, own))

    @property
    def contents(self) -> Contents:
        own = [s.contents for s in self.sources.values() if isinstance(s, InLanes)]
        return [*itertools.chain.from_iterable(own)]

    def apart(self, *, is_shuffled: bool) -> Mixed:
        own = copy.copy(self)
        own.sources = {
            key: source.apart(is_shuffled=is_shuffled)
            if isinstance(source, InLanes)
            else source
            for key, source in self.sources.items()
        }
        return own

    def place(self, index: int) -> tuple[str, int]:
        source, own = self._found(index)
        if isinstance(source, InLanes):
            return source.place(own)
        return str(self.source_of(index)), own

    def __getitem__(self, index: int) -> Any:
        source, own = self._found(index)
        return source[own]

    def _found(self, index: int) -> tuple[Any, int]:
        """Return the source of a sample, and its index there."""
        number = self._number_of(index)
        source = list(self.sources.values())[number]
        return source, index - self._offsets[number]

    def _number_of(self, index: int) -> int:
        return bisect_right(self._offsets, index) - 1

    @cached_property
    def _offsets(self) -> list[int]:
        return [int(offset) for offset in self.lanes.offsets[:-1]]


class MixedLanes:
    """The lanes of all sources, one after another.

    Which source has a position is the same in every loop.

    Attributes:
        offsets: The number of each source's first sample, and of all.
        first_lanes: The same of lanes.

    Args:
        plan: From blocks to the weights from there on.
    """

    def __init__(
        self,
        sources: list[Any],
        plan: dict[int, list[float]],
        block: int,
        num_samples: int | None,
    ) -> None:
        self.sources = sources
        self._length = MAX_INDEX if num_samples is None else num_samples
        self._block = block
        self.lengths = [len(source) for source in sources]
        if 0 in self.lengths:
            raise ValueError(
                f"source {self.lengths.index(0)} of Mixed has no samples. Leave it out."
            )
        self.offsets = np.cumsum([0, *self.lengths])
        widths = [
            source.lanes.num_lanes if isinstance(source, InLanes) else _MAP_LANES
            for source in sources
        ]
        self.first_lanes = np.cumsum([0, *widths])
        self.num_lanes = int(self.first_lanes[-1])
        # From each change of the weights on: the first block, each source's samples in
        # a block, and those that it has had before.
        self._stretches: list[tuple[int, _Numbers, _Numbers]] = []
        for samples, weights in sorted(plan.items()):
            self._add_stretch(-(-samples // block), _counts(weights, block))
        own = [s.lanes.checksum for s in sources if isinstance(s, InLanes)]
        text = repr((plan, block, num_samples, self.lengths, own))
        self.checksum = zlib.crc32(text.encode())

    def _add_stretch(self, first: int, counts: _Numbers) -> None:
        had = np.zeros_like(counts)
        if self._stretches:
            begin, before, had_before = self._stretches[-1]
            had = had_before + (first - begin) * before
            if first == begin:
                self._stretches.pop()
        self._stretches.append((first, counts, had))

    def __len__(self) -> int:
        return self._length

    def located(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the source of each position, and how many of it come before."""
        blocks, places = np.divmod(positions, self._block)
        numbers, samples = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):
            own = blocks == block
            at = bisect_right(self._stretches, int(block), key=lambda each: each[0]) - 1
            first, counts, had = self._stretches[at]
            of_place, before = _table(int(block), tuple(counts.tolist()))
            numbers[own] = of_place[places[own]]
            earlier = had + (block - first) * counts
            samples[own] = before[places[own]] + earlier[numbers[own]]
        return numbers, samples

    def order(self, key: int | None) -> MixedOrder:
        """Return the order that has a key; without one, that of the sources."""
        return MixedOrder(self, key)


@lru_cache(maxsize=8)
def _table(block: int, counts: tuple[int, ...]) -> tuple[_Numbers, _Numbers]:
    """Return the source of each place in a block, and how many come before it."""
    size = sum(counts)
    of_place = np.repeat(np.arange(len(counts)), counts)
    of_place = of_place[Permutation(size, derive_seed(block)).take(np.arange(size))]
    before = np.empty_like(of_place)
    for number, count in enumerate(counts):
        before[of_place == number] = np.arange(count)
    return of_place, before


class MixedOrder:
    """The samples of all sources, each in passes of its own."""

    def __init__(self, lanes: MixedLanes, key: int | None) -> None:
        self._lanes = lanes
        self._orders = [
            Passes(length, lru_cache(maxsize=2)(_orders_of(source, number, key)))
            for number, (source, length) in enumerate(
                zip(lanes.sources, lanes.lengths, strict=True)
            )
        ]

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def num_lanes(self) -> int:
        return self._lanes.num_lanes

    def lane_of(self, positions: _Numbers) -> _Numbers:
        numbers, samples = self._lanes.located(positions)
        lanes = np.empty_like(positions)
        for number, order in enumerate(self._orders):
            own = numbers == number
            if isinstance(self._lanes.sources[number], InLanes):
                lanes[own] = order.lane_of(samples[own])
            else:
                lanes[own] = samples[own] % order.length % _MAP_LANES
        lanes += self._lanes.first_lanes[numbers]
        return lanes

    def num_alike(self, position: int, size: int) -> int:
        del position, size  # The lanes of a block have no period.
        return 1

    def __call__(self, positions: _Numbers) -> _Numbers:
        """Return the number of the sample at each position."""
        numbers, samples = self._lanes.located(positions)
        indices = np.empty_like(positions)
        for number, order in enumerate(self._orders):
            own = numbers == number
            indices[own] = order(samples[own])
        indices += self._lanes.offsets[numbers]
        return indices


def _orders_of(source: Any, number: int, key: int | None) -> Any:
    """Return what gives the order of each of a source's passes."""

    def of_pass(number_of_pass: int) -> Order:
        own = None if key is None else derive_seed(key, number, number_of_pass)
        if isinstance(source, InLanes):
            return source.lanes.order(own)
        if own is None:
            return lambda places: places
        return Permutation(len(source), own).take

    return of_pass


def _counts(weights: list[float], block: int) -> _Numbers:
    """Return each source's samples in a block, by the largest remainders."""
    shares = np.array(weights) / sum(weights) * block
    counts = np.floor(shares).astype(np.int64)
    most = np.argsort(counts - shares, kind="stable")[: block - int(counts.sum())]
    counts[most] += 1
    if np.any((counts == 0) & (shares > 0)):
        raise ValueError(
            f"a source with the weight {min(w for w in weights if w > 0)} has no "
            f"sample in a block of {block}. Take a larger block, or a larger weight."
        )
    return counts


def _checked_plan(keys: list[Any], weights: Any) -> dict[int, list[float]]:
    """Return a plan of weights in the sources' order."""
    plan = (
        weights
        if isinstance(next(iter(weights.values()), None), Mapping)
        else {0: weights}
    )
    if 0 not in plan:
        raise ValueError(
            f"weights={weights!r}: a plan maps numbers of samples seen, beginning with "
            "0, to the weights from then on."
        )
    checked = {}
    for samples, own in plan.items():
        are_weights = set(own) == set(keys) and all(
            isinstance(weight, Real) and 0 <= float(weight) < inf
            for weight in own.values()
        )
        if not (are_weights and sum(own.values()) > 0):
            raise ValueError(
                f"weights={own!r}: give each of the sources {keys!r} a number from 0 "
                "up, and one of them more than 0."
            )
        checked[samples] = [float(own[key]) for key in keys]
    return checked
