"""Reads the batches of a loop, in this process or by a plain DataLoader.

There are three ways to read (`reader_of`):

1. Tensors of a plain `TensorDataset` are indexed, a batch at once (`InMemory`). To read
   them sample by sample, and collate that, takes fifty times as long.
2. Where draws are to depend on the position alone, in workers for example, `Reader`
   seeds the generators first. It is sent a `ReadRequest` in place of a list of indices.
3. Else the data set reads, and draws on the program's own generators, as with torch.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from elasticrun.checkpoint.states.generators import (
    generators_of_cpu,
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.order.plan import SplitIndices, as_lists
from elasticrun.data.workers.forking import sure_to_begin
from elasticrun.logger import Logger
from elasticrun.replicas.signals import (
    handled_stop_signals,
    ignore_stop_signals_in_worker,
    stop_signals_blocked,
)

logger = Logger(__name__)

_NAME_IN_PROFILES = "enumerate(DataLoader)#AdaptiveDataLoader.__next__"
_TENSOR = (torch.Tensor, "torch.Tensor", "Tensor")

# Data-set indices to read, in order (one may occur more than once), and a seed in
# [0, 2**64) for the generators, or one for each sample. A plain tuple: it is sent to a
# worker for every batch, and a class of its own takes several times as long to pickle.
ReadRequest = tuple[list[int], int | list[int]]
# Bytes of a tensor that is sent by value: up to here two to five times as many batches
# a second arrive; from a mebibyte on, shared memory is the faster way.
LARGEST = 1 << 17
_NUM_LOOKED_AT = 3  # Batches in which nothing should be drawn.

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class BatchReader(ABC):
    """Reads what the plan of a loop asks for.

    A loader may hold it, and it does not hold the loader: so persistent workers end
    when a loader is dropped. In a cycle they would be left to the garbage collector, in
    which each takes 5 s to end.

    Attributes:
        is_seeded: Whether reading seeds the generators, so that each request needs a
            seed; else data sets draw on the program's own.
        split: In which form the indices are asked for.
        names_lanes: Whether each request names the lanes of its samples.
    """

    is_seeded: bool
    split: SplitIndices
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
    """What a reader reads, besides what `BatchReader` has of it.

    Attributes:
        dataset: Is asked for all samples of a micro-batch at once.
        collate: Makes the batch of them.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_seeded: bool
    split: SplitIndices


def reader_of(
    loader: DataLoader[Any],
    dataset: Any,
    *,
    is_seeded: bool,
    has_virtual: bool = False,
    draws: bool = True,
    collate: Callable[[Any], Any] | None = None,
) -> BatchReader:
    """Return what reads the next loop over a loader, as its arguments say.

    Args:
        dataset: The loader's, or what stands for it.
        is_seeded: Whether reading is seeded also in this process.
        has_virtual: Whether virtual replicas share out batches: then what reading and
            collating draws is the same here and in workers.
        draws: Whether reading may draw at random.
        collate: In place of the loader's `collate_fn`.
    """
    is_here, collate = loader.num_workers == 0, collate or loader.collate_fn
    whole = in_memory(dataset, collate)
    if whole is not None and (is_here or whole.device.type == "cpu"):
        # Tensors are indexed, a batch at once. Nothing is drawn, so nothing is seeded.
        split = as_tensors(whole.device) if is_here else as_lists
        source = Source(whole, unchanged, False, split)
    elif is_seeded or not is_here:
        reader = Reader(dataset, draws=draws)
        source = Source(reader, collate, True, as_lists)
        if has_virtual and is_here:
            reader.collate = collate
            source = Source(reader, unchanged, True, as_lists)
    else:
        # The data set draws on the program's own generators, as with torch's loader.
        split = as_tensors(None) if takes_tensor(dataset) else as_lists
        source = Source(dataset, collate, False, split)
    if is_here and not loader.pin_memory:
        return _Here(source)
    return ByTorch(loader, source, pin_memory=loader.pin_memory)


class _Here(BatchReader):
    """Reads in this process, where torch's own iterator would only take longer.

    Profilers see the reading under the name that torch gives it.
    """

    def __init__(self, source: Source) -> None:
        self.is_seeded, self.split = source.is_seeded, source.split
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


class ByTorch(BatchReader):
    """Reads by a plain DataLoader, in workers or to pin memory."""

    def __init__(
        self, loader: DataLoader[Any], source: Source, *, pin_memory: bool
    ) -> None:
        self.is_seeded, self.split = source.is_seeded, source.split
        self._is_persistent = loader.persistent_workers
        self._requests = _Requests()
        # Keeps torch from drawing on the program's generator.
        self._own_generator = torch.Generator() if loader.generator is None else None
        init, context = None, None
        if loader.num_workers:
            init = WorkerInit(loader.worker_init_fn)
            context = sure_to_begin(loader.multiprocessing_context)
        with warnings.catch_warnings():
            # Torch has warned of the same arguments when the loader was made.
            warnings.simplefilter("ignore", UserWarning)
            self._inner: DataLoader[Any] = DataLoader(
                source.dataset,
                batch_sampler=self._requests,
                num_workers=loader.num_workers,
                collate_fn=source.collate,
                pin_memory=pin_memory,
                timeout=loader.timeout,
                worker_init_fn=init,
                multiprocessing_context=context,
                generator=loader.generator or self._own_generator,
                prefetch_factor=loader.prefetch_factor,
                persistent_workers=loader.persistent_workers,
                pin_memory_device=loader.pin_memory_device,
            )

    def start(self, plan: Iterable[Any], key: int) -> Iterator[Any]:
        inner = self._inner
        self._requests.plan = plan
        if self._own_generator is not None:
            self._own_generator.manual_seed(key)
        if inner.num_workers == 0:
            return iter(inner)
        if inner.multiprocessing_context.get_start_method() == "forkserver":
            forkserver.ensure_running()
        with stop_signals_blocked():  # One would kill a worker that is just starting.
            return iter(inner)

    def end(self, batches: Iterator[Any]) -> None:
        """End the workers.

        Torch's iterator would do so once it is dropped; but one that has raised is held
        by the traceback, and so by whoever keeps the exception.
        """
        if not self._is_persistent and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class _Requests:
    """The batch sampler of the inner DataLoader; each loop gives it a plan."""

    plan: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan)


def unchanged(batch: Any) -> Any:
    """Return a batch as it is: what was read is collated already."""
    return batch


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


class Reader(Dataset[Any]):
    """A map-style data set that is read by `ReadRequest`.

    Seeded are Python's `random`, NumPy's global generator and torch's CPU generator. A
    worker process belongs to its loader, so they are left as the last sample left
    them; in the main process the program's own generators continue undisturbed.

    Attributes:
        collate: Makes a batch of samples, if it is to draw what it would in a worker.

    Args:
        draws: Whether reading may draw at random; else nothing is seeded.
    """

    def __init__(self, dataset: Any, *, draws: bool = True) -> None:
        self.dataset = dataset
        self.collate: Callable[[Any], Any] = unchanged
        self._draws = draws
        self._num_looked_at = 0  # Batches without draws, of which the first ones are.
        self._takes_tensor = takes_tensor(dataset)

    def __getitems__(self, request: ReadRequest) -> Any:
        """Return the samples of the request, in its order."""
        if get_worker_info() is not None or not self._draws:
            return self._read(*request)
        with program_generators_kept():
            return self.collate(self._read(*request))

    def _read(self, indices: list[int], seed: int | list[int]) -> Sequence[Any]:
        """Return samples; the generators are left as the last one left them."""
        if not self._draws:
            return self._read_without_draws(indices)
        if isinstance(seed, list):
            return self._read_each_seeded(indices, seed)
        _seed(seed)
        wanted = torch.tensor(indices) if self._takes_tensor else indices
        return batch_reading(self.dataset)(wanted)

    def _read_without_draws(self, indices: list[int]) -> Sequence[Any]:
        read = batch_reading(self.dataset)
        if self._num_looked_at == _NUM_LOOKED_AT:
            return read(indices)
        self._num_looked_at += 1
        before = generators_of_cpu()
        samples = read(indices)
        if generators_of_cpu() != before:
            self._num_looked_at = _NUM_LOOKED_AT
            logger.warning(
                "reading %s draws random numbers (in `parse`, perhaps), which are not "
                "seeded there: after a restart, or in other workers, samples will be "
                "others. Draw them in `transform`",
                type(self.dataset).__name__,
            )
        return samples

    def _read_each_seeded(self, indices: list[int], seeds: list[int]) -> list[Any]:
        # Item by item, unless there is but the stub of torch's base class for that.
        method = getattr(type(self.dataset), "__getitem__", Dataset.__getitem__)
        is_stub = method is Dataset.__getitem__
        reads_items = not (is_stub and _has_batch_access(self.dataset))
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            _seed(seed)
            if reads_items:
                samples.append(self.dataset[index])
            else:
                one = torch.tensor([index]) if self._takes_tensor else [index]
                samples.extend(self.dataset.__getitems__(one))
        return samples


def _seed(seed: int) -> None:
    """Seed the generators, and in a worker those that a data set seeds by its info."""
    seed_generators(seed)
    if (information := get_worker_info()) is not None:
        object.__setattr__(information, "seed", torch.initial_seed())


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


def as_tensors(device: torch.device | None) -> SplitIndices:
    """Return what splits indices into tensors, moved to a device all at once."""

    def split(indices: NDArray[np.int64], lengths: list[int]) -> Sequence[Tensor]:
        whole = torch.from_numpy(indices)
        return (whole if device is None else whole.to(device)).split_with_sizes(lengths)

    return split
