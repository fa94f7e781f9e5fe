"""Reads samples in a worker, with random generators seeded by the position.

The loader's batch sampler sends a `ReadRequest` to a DataLoader worker, in place of a
list of indices; there a `Reader`, in place of the data set, reads the samples.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info

from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.order.plan import Cut

_TENSOR = (torch.Tensor, "torch.Tensor", "Tensor")


# Data-set indices to read, in order (one may occur more than once), and a seed in
# [0, 2**64) for the generators, or one for each sample. A plain tuple: it is sent to a
# worker for every batch, and a class of its own takes several times as long to pickle.
ReadRequest = tuple[list[int], int | list[int]]
# Bytes of a tensor that is sent by value: up to here two to five times as many batches
# a second arrive; from a mebibyte on, shared memory is the faster way.
LARGEST = 1 << 17

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


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


def send_small_tensors_by_value() -> None:
    """Let this process, a DataLoader worker, send them inside its messages.

    Torch moves every tensor into shared memory and sends a file descriptor. For a few
    kilobytes, these system calls take several times as long as sending the bytes.
    """
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Reduced:
    # Neither way keeps these two flags, so that torch would deliver other values.
    tensor = tensor.resolve_conj().resolve_neg()
    if not _is_plain(tensor) or not 0 < tensor.nbytes <= LARGEST:
        reduced: Reduced = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return reduced
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its bytes, type and shape are all that there is to it."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and tensor.is_contiguous()
    )


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # A copy in memory of torch's own, aligned and resizable as any other tensor's.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()


class InMemory:
    """The tensors of a plain `TensorDataset`, a batch by one indexing operation.

    To read samples one by one and collate them takes fifty times as long.
    What comes out has the bits, the form and the strides that reading sample by sample
    and torch's default collate give.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset
        self.device = dataset.tensors[0].device

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Tensor) -> list[Tensor]:
        """Return one tensor of the batch for each tensor of the data set."""
        indices = torch.as_tensor(indices)  # A worker is sent a list.
        try:
            return [tensor.index_select(0, indices) for tensor in self.dataset.tensors]
        except IndexError as error:
            wrong = indices[(indices < 0) | (indices >= len(self))].tolist()
            raise IndexError(
                f"the sampler, or the batch sampler, gives the index {wrong[0]}, but "
                f"the data set has {len(self)} samples, which count from 0."
            ) from error


def in_memory(dataset: Any, collate: Any) -> InMemory | None:
    """Return the data set for reading by batches; None where that could differ."""
    if type(dataset) is not TensorDataset or collate is not default_collate:
        return None
    tensors = dataset.tensors
    is_plain = all(
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device == tensors[0].device
        # Stacking samples keeps neither of these.
        and not (tensor.is_conj() or tensor.is_neg())
        and not (tensor.requires_grad or tensor.is_quantized)
        for tensor in tensors
    )
    return InMemory(dataset) if is_plain else None


def cut_into_tensors(device: torch.device | None) -> Cut:
    """Return what cuts indices into tensors, moved to a device all at once."""

    def cut(indices: NDArray[np.int64], lengths: list[int]) -> Sequence[Tensor]:
        whole = torch.from_numpy(indices)
        return (whole if device is None else whole.to(device)).split_with_sizes(lengths)

    return cut
