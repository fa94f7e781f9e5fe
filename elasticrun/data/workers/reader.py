"""How the batches of a loop are read: in this process, or by a plain DataLoader."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, get_worker_info

from elasticrun.data.order.plan import Cut, as_lists
from elasticrun.data.workers.forking import sure_to_begin
from elasticrun.data.workers.in_memory import InMemory, cut_into_tensors, in_memory
from elasticrun.data.workers.reading import Reader, read_batch, takes_tensor
from elasticrun.data.workers.transfer import send_small_tensors_by_value
from elasticrun.replicas.signals import (
    leave_stops_to_parent,
    stops_held_back,
    taken_stops,
)


class Source(NamedTuple):
    """What is read in a loop, and how it is asked for.

    Attributes:
        is_seeded: Whether reading seeds the generators, so that each request needs a
            seed; else data sets draw on the program's own.
        cut: In which form the indices are asked for.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_seeded: bool
    cut: Cut


class BatchReader:
    """Reads what a plan asks for as its loader's arguments say.

    The loader holds it, and it does not hold the loader: so persistent workers end when
    a loader is dropped. In a cycle they would be left to the garbage collector, in
    which each takes 5 s to end.

    Args:
        each_sample: Whether the generators are seeded before each sample.
        is_ahead: Whether a batch is read before the program asks for it. What it drew
            on the program's generators would be in the checkpoint of the batch before.
    """

    def __init__(self, *, each_sample: bool, is_ahead: bool = False) -> None:
        self._each_sample = each_sample
        self.is_ahead = is_ahead
        self._persistent: tuple[DataLoader[Any], Source] | None = None

    def source(self, given: DataLoader[Any]) -> Source:
        """Return what the next loop reads.

        Args:
            given: The loader, which is not iterated itself.
        """
        if self._persistent is not None:
            return self._persistent[1]
        is_here = given.num_workers == 0
        whole = in_memory(given.dataset, given.collate_fn)
        if whole is not None and (is_here or whole.device.type == "cpu"):
            # Nothing is drawn there, so nothing is seeded.
            cut = cut_into_tensors(whole.device) if is_here else as_lists
            return Source(whole, _unchanged, False, cut)
        if not is_here or self._each_sample or self.is_ahead:
            return Source(Reader(given.dataset), given.collate_fn, True, as_lists)
        is_by_tensor = takes_tensor(given.dataset)
        cut = cut_into_tensors(None) if is_by_tensor else as_lists
        return Source(given.dataset, given.collate_fn, False, cut)

    def start(
        self, given: DataLoader[Any], source: Source, plan: Iterable[Any], key: int
    ) -> Iterator[Any]:
        """Start to read.

        Args:
            given: The loader.
            source: What `source` returned for it.
            key: Seeds what torch draws for itself.
        """
        if not given.num_workers and not given.pin_memory:
            return _read_here(source, plan)
        if self._persistent is None:
            inner = _make(given, source, plan, key)
        else:
            inner, _ = self._persistent
            requests = inner.batch_sampler
            assert isinstance(requests, _Requests)
            requests.plan = plan
        if given.persistent_workers:
            self._persistent = inner, source
        return _start_workers(inner)

    def end(self, batches: Iterator[Any]) -> None:
        """End the workers that `start` has started, unless they are persistent.

        Torch's iterator would do so once it is dropped; but one that has raised is held
        by the traceback, and so by whoever keeps the exception.
        """
        if self._persistent is None and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class _Requests:
    """The batch sampler of the inner DataLoader; persistent workers get a new plan."""

    def __init__(self, plan: Iterable[Any]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan)


def _unchanged(batch: Any) -> Any:
    """Return a batch as it is: what was read is collated already."""
    return batch


def _make(
    given: DataLoader[Any], source: Source, plan: Iterable[Any], key: int
) -> DataLoader[Any]:
    """Return a plain DataLoader with the arguments of the given one."""
    generator = given.generator
    if generator is None:  # Keeps torch from drawing on the program's generator.
        generator = torch.Generator().manual_seed(key)
    init, context = None, None
    if given.num_workers:
        init = WorkerInit(given.worker_init_fn)
        context = sure_to_begin(given.multiprocessing_context)
    with warnings.catch_warnings():
        # Torch has warned of the same arguments when the loader was made.
        warnings.simplefilter("ignore", UserWarning)
        return DataLoader(
            source.dataset,
            batch_sampler=_Requests(plan),
            num_workers=given.num_workers,
            collate_fn=source.collate,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=init,
            multiprocessing_context=context,
            generator=generator,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            pin_memory_device=given.pin_memory_device,
        )


def _read_here(source: Source, plan: Iterable[Any]) -> Iterator[Any]:
    """Read in this process; torch's own iterator would take as long for nothing else.

    Profilers see the reading under the name that torch gives it.
    """
    dataset, collate = source.dataset, source.collate
    for request in plan:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with record_function("enumerate(DataLoader)#AdaptiveDataLoader.__next__"):
                batch = collate(read_batch(dataset, request))
        else:
            batch = collate(read_batch(dataset, request))
        yield batch


def _start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`; no stop signal can kill a worker that is just starting."""
    if loader.num_workers == 0:
        return iter(loader)
    if loader.multiprocessing_context.get_start_method() == "forkserver":
        forkserver.ensure_running()
    with stops_held_back():
        return iter(loader)


class WorkerInit:
    """A `worker_init_fn`: stop signals are the replica's; then the user's function."""

    def __init__(self, user_function: Callable[[int], Any] | None) -> None:
        self._user_function = user_function
        self._stops = taken_stops()

    def __call__(self, worker_id: int) -> None:
        leave_stops_to_parent(self._stops)
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
