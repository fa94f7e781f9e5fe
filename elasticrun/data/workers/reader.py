"""Reads the batches of a loop, in this process or by a plain DataLoader."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from elasticrun.data.order.batches import MAX_INDEX
from elasticrun.data.order.lanes import Slots
from elasticrun.data.order.plan import Cut, as_lists
from elasticrun.data.workers.forking import sure_to_begin
from elasticrun.data.workers.reading import (
    DRY,
    CollatingReader,
    InMemory,
    Reader,
    batch_reading,
    cut_into_tensors,
    in_memory,
    send_small_tensors_by_value,
    takes_tensor,
)
from elasticrun.replicas.signals import (
    handled_stop_signals,
    ignore_stop_signals_in_worker,
    stop_signals_blocked,
)

_NAME_IN_PROFILES = "enumerate(DataLoader)#AdaptiveDataLoader.__next__"


class BatchReader(ABC):
    """Reads what the plan of a loop asks for.

    A loader may hold it, and it does not hold the loader: so persistent workers end
    when a loader is dropped. In a cycle they would be left to the garbage collector, in
    which each takes 5 s to end.

    Attributes:
        is_seeded: Whether reading seeds the generators, so that each request needs a
            seed; else data sets draw on the program's own.
        cut: In which form the indices are asked for.
        names_lanes: Whether each request names the lanes of its samples.
    """

    is_seeded: bool
    cut: Cut
    names_lanes = False

    @abstractmethod
    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        """Start to read; return the batches.

        Args:
            key: Seeds what torch draws for itself.
        """

    @abstractmethod
    def end(self, batches: Iterator[Any]) -> None:
        """End what `start` has started, unless it is to be used again."""


class Source(NamedTuple):
    """What is read: see `BatchReader` for the last two."""

    dataset: Any
    collate: Callable[[Any], Any]
    is_seeded: bool
    cut: Cut


def reader_of(
    loader: DataLoader[Any],
    *,
    each_sample: bool,
    is_ahead: bool,
    has_lanes: bool,
    is_shuffled: bool,
    has_virtual: bool,
) -> BatchReader:
    """Return what reads the next loop over a loader, as its arguments say.

    Args:
        each_sample: Whether the generators are seeded before each sample.
        is_ahead: Whether a batch is read before the program asks for it. What it drew
            on the program's generators would be in the checkpoint of the batch before.
        has_lanes: Whether the data set is read in streams.
        is_shuffled: Whether their samples come in another order than they are in.
        has_virtual: Whether virtual replicas share out batches: then what reading and
            collating draws is the same here and in workers.
    """
    dataset: Any = loader.dataset
    reader = Reader(dataset)
    if has_lanes:
        dataset = dataset.apart(is_shuffled=is_shuffled)
        reader = Reader(dataset, draws=dataset.draws)
    has_slots = has_lanes and isinstance(dataset.lanes, Slots)
    if has_slots or (has_lanes and loader.num_workers):
        are_collated = not (has_slots and loader.drop_last)
        return _ByLanes(loader, reader, has_slots=has_slots, are_collated=are_collated)
    is_seeded = each_sample or is_ahead or has_virtual
    source = _source(loader, reader, is_seeded=is_seeded)
    if has_virtual and source.is_seeded and loader.num_workers == 0:
        source = source._replace(
            dataset=CollatingReader(reader, source.collate), collate=_unchanged
        )
    if loader.num_workers or loader.pin_memory:
        return _ByTorch(loader, source, pin_memory=loader.pin_memory)
    return _Here(source)


def _source(loader: DataLoader[Any], reader: Reader, *, is_seeded: bool) -> Source:
    dataset = reader.dataset
    is_here = loader.num_workers == 0
    whole = in_memory(dataset, loader.collate_fn)
    if whole is not None and (is_here or whole.device.type == "cpu"):
        # Nothing is drawn there, so nothing is seeded.
        cut = cut_into_tensors(whole.device) if is_here else as_lists
        return Source(whole, _unchanged, False, cut)
    if is_seeded or not is_here:
        return Source(reader, loader.collate_fn, True, as_lists)
    is_by_tensor = takes_tensor(dataset)
    cut = cut_into_tensors(None) if is_by_tensor else as_lists
    return Source(dataset, loader.collate_fn, False, cut)


class _Here(BatchReader):
    """Reads in this process; torch's own iterator would take as long for nothing else.

    Profilers see the reading under the name that torch gives it.
    """

    def __init__(self, source: Source) -> None:
        self.is_seeded, self.cut = source.is_seeded, source.cut
        self._read = batch_reading(source.dataset)
        self._collate = source.collate

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        del key
        read, collate = self._read, self._collate
        for request in plan:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                with record_function(_NAME_IN_PROFILES):
                    batch = collate(read(request))
            else:
                batch = collate(read(request))
            yield batch

    def end(self, batches: Iterator[Any]) -> None:
        del batches


class _ByTorch(BatchReader):
    """Reads by a plain DataLoader, in workers or to pin memory."""

    def __init__(
        self, loader: DataLoader[Any], source: Source, *, pin_memory: bool
    ) -> None:
        self.is_seeded, self.cut = source.is_seeded, source.cut
        self._is_persistent = loader.persistent_workers
        self._requests = _Requests()
        # Keeps torch from drawing on the program's generator.
        self._own_generator = torch.Generator() if loader.generator is None else None
        generator = loader.generator or self._own_generator
        self._inner = _make(
            loader, source, self._requests, generator, pin_memory=pin_memory
        )

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        self._requests.plan = plan
        if self._own_generator is not None:
            self._own_generator.manual_seed(key)
        return _start_workers(self._inner)

    def end(self, batches: Iterator[Any]) -> None:
        """End the workers.

        Torch's iterator would do so once it is dropped; but one that has raised is held
        by the traceback, and so by whoever keeps the exception.
        """
        if not self._is_persistent and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class _ByLanes(BatchReader):
    """Reads each lane in one worker only, in sequence.

    A worker is asked for its lanes' samples of each micro-batch. It collates them, and
    the pieces are joined here; with a `collate_fn` of the program's own, the samples
    come here, and are collated here. Each sample has a seed of its own, since which
    worker reads it with which others depends on how many there are.

    Args:
        are_collated: Whether batches are made; else lists of samples.
    """

    is_seeded = True
    cut = staticmethod(as_lists)
    names_lanes = True

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: Reader,
        *,
        has_slots: bool,
        are_collated: bool,
    ) -> None:
        self._num_workers = max(loader.num_workers, 1)
        self._has_slots = has_slots
        self._collate = loader.collate_fn if are_collated else _unchanged
        self._is_default = self._collate is default_collate
        self._is_pinned = loader.pin_memory
        collate = partial(
            _present, _collated_if_any if self._is_default else _unchanged
        )
        source = Source(reader, collate, True, as_lists)
        self._by_torch = _ByTorch(loader, source, pin_memory=False)
        self._pieces: Iterator[Any] = iter(())

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        places: deque[list[list[int]]] = deque()
        offset = key * MAX_INDEX if self._has_slots else 0
        dealt = self._dealt(plan, places, offset)
        self._pieces = self._by_torch.start(dealt, key)
        batches = self._batches(self._pieces, places)
        if not self._is_pinned:
            return batches
        return iter(
            DataLoader(_Read(batches), None, collate_fn=_unchanged, pin_memory=True)
        )

    def _dealt(
        self, plan: Iterable[Any], places: deque[list[list[int]]], offset: int
    ) -> Iterator[Any]:
        """Yield what each worker is asked for, which torch sends to them in turn."""
        for indices, seeds, lanes in plan:
            own: list[list[int]] = [[] for _ in range(self._num_workers)]
            for place, lane in enumerate(lanes):
                own[lane % self._num_workers].append(place)
            places.append(own)
            for read in own:
                yield [indices[p] + offset for p in read], [seeds[p] for p in read]

    def _batches(
        self, pieces: Iterator[Any], places: deque[list[list[int]]]
    ) -> Iterator[Any]:
        """Yield the batches that the workers' pieces make.

        With slots, each comes with the places that there are samples in.
        """
        while every := list(islice(pieces, self._num_workers)):
            read, own = [], []
            for (present, piece), asked in zip(every, places.popleft(), strict=True):
                if present:
                    read.append(piece)
                    own.append([asked[at] for at in present])
            slots = sorted(chain(*own))
            if slots and len(slots) <= slots[-1]:  # Some between them are empty.
                places_of = {slot: place for place, slot in enumerate(slots)}
                own = [[places_of[slot] for slot in each] for each in own]
            batch = self._joined(read, own) if read else None
            yield (slots, batch) if self._has_slots else batch

    def _joined(self, read: list[Any], own: list[list[int]]) -> Any:
        if self._is_default:
            return joined(read, own)
        samples = dict(zip(chain(*own), chain(*read), strict=True))
        return self._collate([samples[place] for place in sorted(samples)])

    def end(self, batches: Iterator[Any]) -> None:
        del batches
        self._by_torch.end(self._pieces)


def _collated_if_any(samples: list[Any]) -> Any:
    return default_collate(samples) if samples else None


def _present(
    collate: Callable[[Any], Any], samples: list[Any]
) -> tuple[list[int], Any]:
    """Return where among samples there are any, and what these make."""
    present = [place for place, sample in enumerate(samples) if sample is not DRY]
    return present, collate([samples[place] for place in present])


class _Read(IterableDataset[Any]):
    """Batches that were read already, for torch to pin."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class _Requests:
    """The batch sampler of the inner DataLoader; each loop gives it a plan."""

    plan: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan)


def _unchanged(batch: Any) -> Any:
    """Return a batch as it is: what was read is collated already."""
    return batch


def _make(
    given: DataLoader[Any],
    source: Source,
    requests: _Requests,
    generator: torch.Generator | None,
    *,
    pin_memory: bool,
) -> DataLoader[Any]:
    """Return a plain DataLoader with the arguments of the given one."""
    init, context = None, None
    if given.num_workers:
        init = WorkerInit(given.worker_init_fn)
        context = sure_to_begin(given.multiprocessing_context)
    with warnings.catch_warnings():
        # Torch has warned of the same arguments when the loader was made.
        warnings.simplefilter("ignore", UserWarning)
        return DataLoader(
            source.dataset,
            batch_sampler=requests,
            num_workers=given.num_workers,
            collate_fn=source.collate,
            pin_memory=pin_memory,
            timeout=given.timeout,
            worker_init_fn=init,
            multiprocessing_context=context,
            generator=generator,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            pin_memory_device=given.pin_memory_device,
        )


def _start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`; no stop signal can kill a worker that is just starting."""
    if loader.num_workers == 0:
        return iter(loader)
    if loader.multiprocessing_context.get_start_method() == "forkserver":
        forkserver.ensure_running()
    with stop_signals_blocked():
        return iter(loader)


class WorkerInit:
    """A `worker_init_fn`: stop signals are the replica's; then the user's function."""

    def __init__(self, user_function: Callable[[int], Any] | None) -> None:
        self._user_function = user_function
        self._stops = handled_stop_signals()

    def __call__(self, worker_id: int) -> None:
        ignore_stop_signals_in_worker(self._stops)
        # What the worker inherited is not garbage. Each full collection would write to
        # all of it, so that a fork copies the program's memory page by page.
        gc.freeze()
        send_small_tensors_by_value()
        information = get_worker_info()
        assert information is not None
        if isinstance(information.dataset, (Reader, InMemory)):
            # The user's function must find the user's own data set there; torch
            # guards the attribute against mistakes.
            object.__setattr__(information, "dataset", information.dataset.dataset)
        if self._user_function is not None:
            self._user_function(worker_id)


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
