"""Reads data in streams: each lane in one worker only, in sequence.

1. Lane l of this replica is that of worker l mod the number of workers.
2. Of each micro-batch, every worker is asked for the samples of its lanes, in turn.
   Torch's loader keeps that turn, so each worker's piece comes back in it.
3. A worker collates its piece; the pieces are joined here as if all samples had been
   collated at once. With a `collate_fn` of the program's own, the samples come here.

Torch gives a whole batch to one worker: each would have to open all streams.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.order.lanes import UncountedLanes
from elasticrun.data.order.permutation import MAX_INDEX
from elasticrun.data.order.plan import as_lists
from elasticrun.data.workers.reader import (
    BatchReader,
    ByTorch,
    Reader,
    Source,
    reader_of,
    unchanged,
)
from elasticrun.errors import ElasticRunError


class _Exhausted(enum.Enum):  # Of which there is one, also after it was sent.
    EXHAUSTED = enum.auto()


# What is read for a sample that a lane does not have any more.
EXHAUSTED = _Exhausted.EXHAUSTED
# For each batch that was asked for: the places of each worker's samples in it, and a
# seed for what collating draws.
_Places = deque[tuple[list[list[int]], int]]


def reader_of_lanes(
    loader: DataLoader[Any],
    *,
    is_shuffled: bool,
    is_seeded: bool,
    has_virtual: bool = False,
) -> BatchReader:
    """Return what `reader_of` does, where the loader's data set has lanes.

    Args:
        is_shuffled: Whether samples come in another order than they are in.
    """
    given: Any = loader.dataset
    dataset = given.apart(is_shuffled=is_shuffled)
    has_slots = isinstance(dataset.lanes, UncountedLanes)
    if has_slots or has_virtual or loader.num_workers:
        return _ByLanes(
            loader,
            Reader(dataset, draws=dataset.draws),
            has_slots=has_slots,
            is_collated_seeded=is_seeded,
        )
    return reader_of(
        loader,
        dataset,
        is_seeded=is_seeded,
        draws=dataset.draws,
        collate=_collated if loader.collate_fn is default_collate else None,
    )


class _ByLanes(BatchReader):
    """Reads each lane in one worker only, in sequence.

    Each sample has a seed of its own, since which worker reads it with which others
    depends on how many there are.

    Args:
        is_collated_seeded: Whether a `collate_fn` of the program's own draws by the
            seed of the batch's first sample, and not on the program's generators.
    """

    is_seeded = True
    split = staticmethod(as_lists)
    names_lanes = True

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: Reader,
        *,
        has_slots: bool,
        is_collated_seeded: bool,
    ) -> None:
        self._num_workers = max(loader.num_workers, 1)
        self._has_slots = has_slots
        self._collate = loader.collate_fn
        self._is_default = self._collate is default_collate
        self._is_collated_seeded = is_collated_seeded
        self._is_pinned = loader.pin_memory
        collate = partial(_present, _collated_if_any if self._is_default else unchanged)
        source = Source(reader, collate, True, as_lists)
        self._by_torch = ByTorch(loader, source, pin_memory=False)
        self._pieces: Iterator[Any] = iter(())

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        places: _Places = deque()
        offset = key * MAX_INDEX if self._has_slots else 0
        dealt = self._dealt(plan, places, offset)
        self._pieces = self._by_torch.start(dealt, key)
        batches = self._batches(self._pieces, places)
        if not self._is_pinned:
            return batches
        return iter(
            DataLoader(_Read(batches), None, collate_fn=unchanged, pin_memory=True)
        )

    def _dealt(
        self, plan: Iterable[Any], places: _Places, offset: int
    ) -> Iterator[Any]:
        """Yield what each worker is asked for, which torch sends to them in turn."""
        for indices, seeds, lanes in plan:
            own: list[list[int]] = [[] for _ in range(self._num_workers)]
            for place, lane in enumerate(lanes):
                own[lane % self._num_workers].append(place)
            places.append((own, derive_seed(*seeds[:1], 1)))
            for read in own:
                yield [indices[p] + offset for p in read], [seeds[p] for p in read]

    def _batches(self, pieces: Iterator[Any], places: _Places) -> Iterator[Any]:
        """Yield the batches that the workers' pieces make.

        With slots, each comes with the places that there are samples in.
        """
        while answers := list(islice(pieces, self._num_workers)):
            # Each worker says which of the samples that it was asked for there are: of
            # a lane that has ended there is none. So these are the pieces, and the
            # places in the batch that the samples of each piece have.
            read, own = [], []
            all_asked, seed = places.popleft()
            for (present, piece), asked in zip(answers, all_asked, strict=True):
                if present:
                    read.append(piece)
                    own.append([asked[at] for at in present])

            # Empty slots are left out of what is collated: places count from 0 there.
            slots = sorted(chain(*own))
            if slots and len(slots) <= slots[-1]:
                places_of = {slot: place for place, slot in enumerate(slots)}
                own = [[places_of[slot] for slot in each] for each in own]

            # One batch is joined of the pieces. There may be none.
            batch = self._joined(read, own, seed) if read else None
            yield (slots, batch) if self._has_slots else batch

    def _joined(self, read: list[Any], own: list[list[int]], seed: int) -> Any:
        if self._is_default:
            return joined(read, own)
        by_place = dict(zip(chain(*own), chain(*read), strict=True))
        samples = [by_place[place] for place in sorted(by_place)]
        if not self._is_collated_seeded:
            return self._collate(samples)
        with program_generators_kept():
            seed_generators(seed)
            return self._collate(samples)

    def end(self, batches: Iterator[Any]) -> None:
        del batches
        self._by_torch.end(self._pieces)


def _collated_if_any(samples: list[Any]) -> Any:
    return _collated(samples) if samples else None


def _collated(samples: list[Any]) -> Any:
    _refuse_unlike(samples)
    return default_collate(samples)


def _refuse_unlike(samples: Sequence[Any]) -> None:
    """Refuse samples, or batches of them, that do not have the same members."""
    first = samples[0]
    if not isinstance(first, Mapping):
        return
    for other in samples:  # Torch would leave out what the first one does not have.
        if isinstance(other, type(first)) and other.keys() != first.keys():
            named = [f"{[*each]} ({each.get('__key__')!r})" for each in (first, other)]
            raise ElasticRunError(
                f"two samples of a batch have the members {named[0]} and {named[1]}, "
                "and a batch is made of what all its samples have. Let transform "
                "return the same of each, or give the loader a collate_fn."
            )


def _present(
    collate: Callable[[Any], Any], samples: list[Any]
) -> tuple[list[int], Any]:
    """Return where among samples there are any, and what these make."""
    present = [place for place, sample in enumerate(samples) if sample is not EXHAUSTED]
    return present, collate([samples[place] for place in present])


class _Read(IterableDataset[Any]):
    """Batches that were read already, for torch to pin."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def joined(pieces: Sequence[Any], places: Sequence[Sequence[int]]) -> Any:
    """Return what torch's default collate makes of all samples in their order.

    Args:
        pieces: What it has made of the samples of each worker that has any.
        places: Where these samples are in the batch.
    """
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    if isinstance(first, Tensor):
        order = torch.tensor([place for own in places for place in own])
        whole = torch.cat(list(pieces))
        return torch.empty_like(whole).index_copy_(0, order, whole)
    if isinstance(first, Mapping):
        _refuse_unlike(pieces)
        merged = {key: joined([p[key] for p in pieces], places) for key in first}
        kind: Any = type(first)
        return merged if kind is dict else kind(merged)
    if not first:
        return first
    if isinstance(first[0], (str, bytes)):
        samples: list[Any] = [None] * sum(map(len, places))
        for piece, own in zip(pieces, places, strict=True):
            for place, sample in zip(own, piece, strict=True):
                samples[place] = sample
        return type(first)(samples)
    fields = [joined(own, places) for own in zip(*pieces, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
