"""Reads samples in a worker, with random generators seeded by the position.

The loader's batch sampler sends a `ReadRequest` to a DataLoader worker, in place of a
list of indices; there a `Reader`, in place of the data set, reads the samples.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)

_TENSOR = (torch.Tensor, "torch.Tensor", "Tensor")


# Data-set indices to read, in order (one may occur more than once), and a seed in
# [0, 2**64) for the generators, or one for each sample. A plain tuple: it is sent to a
# worker for every batch, and a class of its own takes several times as long to pickle.
ReadRequest = tuple[list[int], int | list[int]]


class _Dry(enum.Enum):  # Of which there is one, also after it was sent.
    DRY = enum.auto()


# What is read for a sample that a lane does not have any more.
DRY = _Dry.DRY


class Reader(Dataset[Any]):
    """A map-style data set that is read by `ReadRequest`.

    Seeded are Python's `random`, NumPy's global generator and torch's CPU generator. A
    worker process belongs to its loader, so they are left as the last sample left
    them; in the main process the program's own generators continue undisturbed.

    Args:
        draws: Whether reading may draw at random; else nothing is seeded.
    """

    def __init__(self, dataset: Any, *, draws: bool = True) -> None:
        self.dataset = dataset
        self._draws = draws
        self._takes_tensor = takes_tensor(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: ReadRequest) -> Sequence[Any]:
        """Return the samples of the request, in its order."""
        if get_worker_info() is not None or not self._draws:
            return self.read_seeded(*request)
        with program_generators_kept():
            return self.read_seeded(*request)

    def read_seeded(self, indices: list[int], seed: int | list[int]) -> Sequence[Any]:
        """Return samples; the generators are left as the last one left them."""
        if not self._draws:
            return batch_reading(self.dataset)(indices)
        if isinstance(seed, list):
            return self._read_each_seeded(indices, seed)
        seed_generators(seed)
        wanted = torch.tensor(indices) if self._takes_tensor else indices
        return batch_reading(self.dataset)(wanted)

    def _read_each_seeded(self, indices: list[int], seeds: list[int]) -> list[Any]:
        reads_items = _has_item_access(self.dataset) or not _has_batch_access(
            self.dataset
        )
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_generators(seed)
            if reads_items:
                samples.append(self.dataset[index])
            else:
                one = torch.tensor([index]) if self._takes_tensor else [index]
                samples.extend(self.dataset.__getitems__(one))
        return samples


class CollatingReader(Dataset[Any]):
    """Reads in the main process, and collates, with what a worker would draw for it."""

    def __init__(self, reader: Reader, collate: Callable[[Any], Any]) -> None:
        self._reader = reader
        self._collate = collate

    def __getitems__(self, request: ReadRequest) -> Any:
        with program_generators_kept():
            return self._collate(self._reader.read_seeded(*request))


def batch_reading(dataset: Any) -> Callable[[Any], Sequence[Any]]:
    """Return what reads the samples at indices, in the way of torch's own fetcher."""
    if _has_batch_access(dataset):
        read: Callable[[Any], Sequence[Any]] = dataset.__getitems__
        return read
    return lambda indices: [dataset[index] for index in indices]


def _has_batch_access(dataset: Any) -> bool:
    return bool(getattr(dataset, "__getitems__", None))


def takes_tensor(dataset: Any) -> bool:
    """Return whether `__getitems__` wants a tensor: its parameter is annotated so.

    A list of a few hundred integers takes longer to index with than the batch.
    """
    method = getattr(type(dataset), "__getitems__", None)
    if method is None:
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # A method of C, which has no signature.
        return False
    return len(parameters) > 1 and parameters[1].annotation in _TENSOR


def _has_item_access(dataset: Any) -> bool:
    """Return whether `dataset[index]` works; torch's base class has a stub for it."""
    method = getattr(type(dataset), "__getitem__", None)
    return method is not None and method is not Dataset.__getitem__
