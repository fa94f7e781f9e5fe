"""How the batches of a loop are read: in this process, or by a plain DataLoader."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, get_worker_info

from elasticrun.data.forking import sure_to_begin
from elasticrun.data.reading import Reader, read_batch
from elasticrun.data.transfer import send_small_tensors_by_value
from elasticrun.signals import leave_stops_to_parent, stops_held_back


class BatchReader:
    """Reads what a plan asks for as its loader's arguments say.

    It does not keep the loader, which keeps it: who drops a loader ends its persistent
    workers. The garbage collector would take 5 s to end each of them.

    Args:
        loader: With the user's own arguments.
        each_sample: Whether the generators are seeded before each sample.

    Attributes:
        is_seeded: Whether reading seeds; without, the program's own generators run on.
    """

    def __init__(self, loader: DataLoader[Any], *, each_sample: bool) -> None:
        self._persistent: DataLoader[Any] | None = None
        self.is_seeded = loader.num_workers > 0 or each_sample

    def start(
        self, given: DataLoader[Any], plan: Iterable[Any], key: int
    ) -> Iterator[Any]:
        """Start to read.

        Args:
            given: The loader, which is not iterated itself.
            key: Seeds what torch draws for itself.
        """
        source = Reader(given.dataset) if self.is_seeded else given.dataset
        if not given.num_workers and not given.pin_memory:
            return _read_here(source, given.collate_fn, plan)
        inner = self._persistent
        if inner is None:
            inner = _make(given, source, plan, key)
        else:
            requests = inner.batch_sampler
            assert isinstance(requests, _Requests)
            requests.plan = plan
        if given.persistent_workers:
            self._persistent = inner
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


def _make(
    given: DataLoader[Any], source: Any, plan: Iterable[Any], key: int
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
            source,
            batch_sampler=_Requests(plan),
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=init,
            multiprocessing_context=context,
            generator=generator,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            pin_memory_device=given.pin_memory_device,
        )


def _read_here(
    dataset: Any, collate: Callable[[Any], Any], plan: Iterable[Any]
) -> Iterator[Any]:
    """Read in this process; torch's own iterator would take as long for nothing else.

    Profilers see the reading under the name that torch gives it.
    """
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

    def __call__(self, worker_id: int) -> None:
        leave_stops_to_parent()
        # What the worker inherited is not garbage. Each full collection would write to
        # all of it, so that a fork copies the program's memory page by page.
        gc.freeze()
        send_small_tensors_by_value()
        information = get_worker_info()
        assert information is not None
        if isinstance(information.dataset, Reader):
            # The user's function must find the user's own data set there; torch
            # guards the attribute against mistakes.
            object.__setattr__(information, "dataset", information.dataset.dataset)
        if self._user_function is not None:
            self._user_function(worker_id)
