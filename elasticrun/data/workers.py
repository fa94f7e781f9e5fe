"""How DataLoader workers start, and what they do first."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from elasticrun.data.reading import Reader
from elasticrun.signals import leave_stops_to_parent, stops_held_back


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
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
