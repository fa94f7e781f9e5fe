"""The plain DataLoader that reads the batches of a loop, and how its workers start."""

from __future__ import annotations

import gc
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from elasticrun.data.reading import Reader
from elasticrun.signals import leave_stops_to_parent, stops_held_back


class BatchReader:
    """Reads what a plan asks for as its loader's arguments say.

    Args:
        loader: With the user's own arguments; it is not iterated.
        each_sample: Whether the generators are seeded before each sample.

    Attributes:
        is_seeded: Whether reading seeds; without, the program's own generators run on.
    """

    def __init__(self, loader: DataLoader[Any], *, each_sample: bool) -> None:
        self._loader = loader
        self._persistent: DataLoader[Any] | None = None
        self.is_seeded = loader.num_workers > 0 or each_sample

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        """Start to read; `key` seeds what torch draws for itself."""
        inner = self._persistent
        if inner is None:
            inner = self._make(plan, key)
        else:
            requests = inner.batch_sampler
            assert isinstance(requests, _Requests)
            requests.plan = plan
        if self._loader.persistent_workers:
            self._persistent = inner
        return _start_workers(inner)

    def _make(self, plan: Iterable[Any], key: int) -> DataLoader[Any]:
        given = self._loader
        generator = given.generator
        if generator is None:  # Keeps torch from drawing on the program's generator.
            generator = torch.Generator().manual_seed(key)
        init = WorkerInit(given.worker_init_fn) if given.num_workers else None
        with warnings.catch_warnings():
            # Torch has warned of the same arguments when the loader was made.
            warnings.simplefilter("ignore", UserWarning)
            return DataLoader(
                Reader(given.dataset) if self.is_seeded else given.dataset,
                batch_sampler=_Requests(plan),
                num_workers=given.num_workers,
                collate_fn=given.collate_fn,
                pin_memory=given.pin_memory,
                timeout=given.timeout,
                worker_init_fn=init,
                multiprocessing_context=given.multiprocessing_context,
                generator=generator,
                prefetch_factor=given.prefetch_factor,
                persistent_workers=given.persistent_workers,
                pin_memory_device=given.pin_memory_device,
            )


class _Requests:
    """The batch sampler of the inner DataLoader; persistent workers get a new plan."""

    def __init__(self, plan: Iterable[Any]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan)


def _start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`; no stop signal can kill a worker that is just starting."""
    if loader.num_workers == 0:
        return iter(loader)
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() == "forkserver":
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
        information = get_worker_info()
        assert information is not None
        if isinstance(information.dataset, Reader):
            # The user's function must find the user's own data set there; torch
            # guards the attribute against mistakes.
            object.__setattr__(information, "dataset", information.dataset.dataset)
        if self._user_function is not None:
            self._user_function(worker_id)
