"""What a loader's arguments make of its order, and of its cut into batches."""

from __future__ import annotations

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.batches import (
    MAX_INDEX,
    Batches,
    CycledBatches,
    EqualBatches,
    ListedBatches,
    PlannedBatches,
    SizePlan,
)
from elasticrun.data.order.permutation import Permutation
from elasticrun.data.order.plan import Order

_WHAT_A_SAMPLER_IS = (
    "Give the data-set indices themselves, whole numbers in one dimension; of weights "
    "torch.multinomial(weights, num_samples, generator=...), of a mask "
    "mask.nonzero().flatten()."
)
MAX_LISTS = 1 << 29  # Batches of lists without an end: places fit 62 bits.
_NUM_BATCHES_CHECKED = 20
_NUM_CHECKED = 1000  # Entries of a user's order that its checksum looks at.


def check_sampler(
    sampler: Any, batch_sampler: Any, *, shuffle: bool, batch_size: Any, drop_last: bool
) -> None:
    """Refuse what cannot be read at a position.

    Raises:
        TypeError: A sampler that can only be iterated, or whose entries are no indices.
        ValueError: Arguments that exclude each other, or an empty sampler.
    """
    if batch_sampler is not None:
        if sampler is not None or batch_size != 1 or drop_last:
            raise ValueError(
                "batch_sampler= excludes batch_size, sampler and drop_last: it gives "
                "the batches itself. Leave the others out."
            )
        _check_map(batch_sampler, "batch_sampler")
        batch_at(batch_sampler, 0)
        return
    if sampler is None:
        return
    if shuffle:
        raise ValueError(
            "sampler= and shuffle=True exclude each other: the sampler is the order. "
            "Leave one of them out."
        )
    _check_map(sampler, "sampler")
    if isinstance(sampler, (torch.Tensor, np.ndarray)):
        _check_array(sampler)
    else:
        order_of_map(sampler, key=0)(np.zeros(1, np.int64))


def _check_map(given: Any, name: str) -> None:
    """Refuse what has no length, or can only be iterated; say what to write instead."""
    kind = type(given).__name__
    if (line := _line_for(given)) is not None:
        raise TypeError(
            f"{name}={kind} draws its order as it is iterated, so a loop could not "
            "resume in its middle without drawing everything before it again, nor be "
            f"shared out among replicas. Write instead: {line}"
        )
    is_map = any(hasattr(given, n) for n in ("keyed", "take", "__getitem__"))
    if not (hasattr(given, "__len__") and is_map):
        raise TypeError(
            f"{name}={kind} has no length, or cannot be read at a position, so a loop "
            "could not resume in its middle without drawing everything before it "
            "again. Draw the order in advance and give it as a list or array: "
            f"{name}=list(your_sampler), made from a fixed seed."
        )
    if len(given) == 0:
        raise ValueError(
            f"the {name.replace('_', ' ')} ({kind}) is empty, so no loop can deliver "
            "anything. Look at how it was made."
        )


def _line_for(given: Any) -> str | None:
    """Return the line that does what one of torch's samplers is for."""
    if isinstance(given, WeightedRandomSampler):
        return (
            f"sampler=WeightedDraws(weights, num_samples={given.num_samples}, "
            f"replacement={given.replacement}), from elasticrun."
        )
    if isinstance(given, SubsetRandomSampler):
        return (
            "AdaptiveDataLoader(Subset(dataset, indices), ..., shuffle=True), with "
            "Subset from torch.utils.data."
        )
    if isinstance(given, BatchSampler):
        return (
            f"batch_size={given.batch_size}, drop_last={given.drop_last}, and the "
            "order as shuffle=True or sampler=; or, for batches of your own, "
            "batch_sampler= with a list of lists of indices."
        )
    if isinstance(given, (RandomSampler, DistributedSampler)):
        return "shuffle=True; every replica gets its part."
    if isinstance(given, SequentialSampler):
        return "neither sampler nor shuffle: that is the order of the data set."
    return None


class SampleOrder:
    """An order of samples, cut into global batches by their size.

    Args:
        length: Of the whole order.
        num_samples: How much of it a loop delivers.
        batch_size: Samples in a global batch, or the plan of that.
        sampler: A map from position to index, or None.
    """

    def __init__(
        self,
        length: int,
        num_samples: int,
        batch_size: int | SizePlan,
        *,
        shuffle: bool,
        drop_last: bool,
        sampler: Any,
    ) -> None:
        self._length = length
        self.num_samples = num_samples
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._sampler = sampler

    @property
    def checksum(self) -> int | None:
        """That of entries all over a user's sampler; None without one."""
        if self._sampler is None:
            return None
        step = max(1, self._length // _NUM_CHECKED)
        positions = np.arange(0, self._length, step, dtype=np.int64)
        return _checksum(order_of_map(self._sampler, key=0)(positions))

    def batches(self, epoch: int, key: int = 0) -> Batches:
        """Return the batches of a loop in an epoch."""
        del key  # Their sizes depend on no order.
        size = self._batch_size
        if isinstance(size, int):
            return EqualBatches(self.num_samples, size, self._drop_last)
        seen = epoch * self.num_samples
        return PlannedBatches(size, self.num_samples, seen, self._drop_last)

    def order(self, key: int) -> Order:
        """Return the order of the loop that has a key."""
        return self._order(derive_seed(key, 1))

    def endless_batches(self, key: int = 0) -> Batches:
        """Return the batches of passes without end, which lie across their ends."""
        del key
        size = self._batch_size
        if isinstance(size, int):
            return EqualBatches(MAX_INDEX // size * size, size)
        return PlannedBatches(size, MAX_INDEX)

    def endless_order(self, key: int) -> Order:
        """Return the order of passes without end that have a key.

        Raises:
            ValueError: No pass has a batch, or nobody knows where one ends.
        """
        length = self.num_samples
        if self._drop_last:
            if not isinstance(self._batch_size, int):
                raise ValueError(
                    "batches() of a loader with drop_last=True and a plan of batch "
                    "sizes: where each pass would end depends on all passes before "
                    "it. Leave drop_last out; batches then lie across the ends of "
                    "passes, and all are full."
                )
            length -= length % self._batch_size
            if length == 0:
                raise ValueError(
                    f"batches() of a loader with drop_last=True, whose "
                    f"{self.num_samples} samples do not make one batch of "
                    f"{self._batch_size}: no pass would deliver anything. Leave "
                    "drop_last out, or take smaller batches."
                )

        return self._passes(key, length)

    def cycled(self, epoch: int, key: int) -> tuple[Batches, Order]:
        """Return the batches of one pass, again and again, each pass in a new order."""
        once = self.batches(epoch)
        return CycledBatches(once), self._passes(key, once.start(len(once)))

    def _passes(self, key: int, length: int) -> Order:
        @functools.lru_cache(maxsize=1)
        def of_pass(number: int) -> Order:
            return self._order(derive_seed(key, 1, number))

        return passes(length, of_pass)

    def _order(self, key: int) -> Order:
        if self._sampler is not None:
            return order_of_map(self._sampler, key=key)
        return Permutation(self._length, key).take if self._shuffle else _unchanged


class ListedOrder:
    """Batches that are lists of one's own; a batch is a step of the index.

    Args:
        batch_sampler: A map from a batch's number to its data-set indices.
        num_samples: How many of them a loop delivers: here it counts batches.
        shuffle: Whether they come in another order in each loop.
    """

    def __init__(self, batch_sampler: Any, num_samples: int, *, shuffle: bool) -> None:
        self._batch_sampler = batch_sampler
        self.num_samples = num_samples
        self._shuffle = shuffle

    @property
    def checksum(self) -> int:
        """That of some of the user's batches, from all over them."""
        own = self._batch_sampler
        own = own.keyed(0) if hasattr(own, "keyed") else own
        step = max(1, len(own) // _NUM_BATCHES_CHECKED)
        batches = [batch_at(own, number) for number in range(0, len(own), step)]
        return _checksum(np.concatenate(batches))

    def batches(self, epoch: int, key: int = 0) -> Batches:
        """Return the batches of a loop."""
        del epoch
        lists = self._lists(derive_seed(key, 1))
        return ListedBatches(self.num_samples, lambda number: len(lists(number)))

    def order(self, key: int) -> Order:
        """Return the order of the loop that has a key."""
        return _order_of_lists(self._lists(derive_seed(key, 1)))

    def endless_batches(self, key: int = 0) -> Batches:
        """Return the batches of passes without end."""
        lists = self._endless_lists(key)
        return ListedBatches(MAX_LISTS, lambda number: len(lists(number)))

    def endless_order(self, key: int) -> Order:
        """Return the order of passes without end that have a key."""
        return _order_of_lists(self._endless_lists(key))

    def cycled(self, epoch: int, key: int) -> tuple[Batches, Order]:
        """Return the batches of one pass, again and again, each pass in a new order."""
        del epoch
        return self.endless_batches(key), self.endless_order(key)

    def _endless_lists(self, key: int) -> Lists:
        @functools.lru_cache(maxsize=2)
        def of_pass(number: int) -> Lists:
            return self._lists(derive_seed(key, 1, number))

        def batch(number: int) -> NDArray[np.int64]:
            number, place = divmod(number, self.num_samples)
            return of_pass(number)(place)

        return batch

    def _lists(self, key: int) -> Lists:
        own = self._batch_sampler
        if hasattr(own, "keyed"):
            own = own.keyed(key)
        order = Permutation(len(own), key) if self._shuffle else range(len(own))

        @functools.lru_cache(maxsize=2)  # Its size is asked for before its indices.
        def batch(number: int) -> NDArray[np.int64]:
            return batch_at(own, order[number])

        return batch


# From the number of a batch to its indices.
Lists = Callable[[int], NDArray[np.int64]]


def _order_of_lists(lists: Lists) -> Order:
    def order(places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at places of one batch."""
        number = int(places[0]) // ListedBatches.span
        return lists(number)[places % ListedBatches.span]

    return order


def batch_at(batch_sampler: Any, number: int) -> NDArray[np.int64]:
    """Return one of the user's batches.

    Raises:
        TypeError: It is no list of indices.
        ValueError: It is empty.
    """
    batch = batch_sampler[number]
    if not hasattr(batch, "__len__"):
        raise TypeError(
            f"batch {number} of batch_sampler={type(batch_sampler).__name__} is "
            f"{batch!r}, but a batch is a list of data-set indices. An order of single "
            "samples is given as sampler=, with a batch_size."
        )
    if isinstance(batch, torch.Tensor):
        batch = batch.cpu().numpy()
    if isinstance(batch, np.ndarray):
        _check_array(batch)
        indices = batch.astype(np.int64)
    else:
        indices = _indices_at(batch, list(range(len(batch))))
    if len(indices) == 0:
        raise ValueError(
            f"batch {number} of batch_sampler={type(batch_sampler).__name__} is empty, "
            "so there is nothing to step with. Leave empty batches out."
        )
    return indices


def passes(length: int, order_of_pass: Callable[[int], Order]) -> Order:
    """Return the order of passes one after another, each of which has its own.

    Place p is place p mod length of pass p div length. Nothing before a place is
    computed, however many passes lie before it.
    """

    def order(places: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers, own_places = np.divmod(places, length)
        indices = np.empty_like(places)
        for number in np.unique(numbers):
            is_own = numbers == number
            indices[is_own] = order_of_pass(int(number))(own_places[is_own])
        return indices

    return order


def _checksum(indices: NDArray[np.int64]) -> int:
    return zlib.crc32(indices.astype("<i8").tobytes())


def _unchanged(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Be the order of the data set."""
    return positions


def order_of_map(sampler: Any, *, key: int) -> Order:
    """Return the order that a user's map is.

    Args:
        key: For a map that has another order in each loop (`keyed`).
    """
    if hasattr(sampler, "keyed"):
        sampler = sampler.keyed(key)
    if isinstance(sampler, torch.Tensor):
        sampler = sampler.cpu().numpy()
    if isinstance(sampler, np.ndarray):
        array = sampler
        return lambda positions: array[positions].astype(np.int64)
    if hasattr(sampler, "take"):
        return functools.partial(_taken, sampler)
    return lambda positions: _indices_at(sampler, positions.tolist())


def _taken(sampler: Any, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    taken = sampler.take(positions)
    if isinstance(taken, torch.Tensor):
        taken = taken.cpu().numpy()
    indices = np.asarray(taken)
    if indices.shape != positions.shape or indices.dtype.kind not in "iu":
        raise TypeError(
            f"take() of sampler={type(sampler).__name__} returned "
            f"{type(taken).__name__} of {indices.dtype} with the shape "
            f"{indices.shape} for {len(positions)} positions. Return one data-set "
            "index, a whole number, for each position."
        )
    return indices.astype(np.int64, copy=False)


def _check_array(sampler: torch.Tensor | NDArray[Any]) -> None:
    is_whole = str(sampler.dtype).removeprefix("torch.").startswith(("int", "uint"))
    if sampler.ndim != 1 or not is_whole:
        raise TypeError(
            f"sampler={type(sampler).__name__} of {sampler.dtype} with the shape "
            f"{tuple(sampler.shape)} is no order. {_WHAT_A_SAMPLER_IS}"
        )


def _indices_at(sampler: Any, positions: list[int]) -> NDArray[np.int64]:
    """Return what stands at positions; not with `int`, which makes weights to 0."""
    entries = [sampler[position] for position in positions]
    with contextlib.suppress(TypeError):
        if bool not in map(type, entries):
            return np.fromiter(map(operator.index, entries), np.int64, len(entries))
    position, entry = next(
        (position, entry)
        for position, entry in zip(positions, entries, strict=True)
        if not _is_index(entry)
    )
    raise TypeError(
        f"sampler={type(sampler).__name__} is no order: at position {position} it has "
        f"{entry!r}. {_WHAT_A_SAMPLER_IS}"
    )


def _is_index(entry: Any) -> bool:
    try:
        operator.index(entry)
    except TypeError:
        return False
    return not isinstance(entry, bool)


class NoBatchSampler:
    """Stands for the loader's batch sampler, and refuses to be taken for one.

    Others make a loader of their own from it, as `accelerator.prepare` does; that one
    would deal each batch out once more, and have neither order nor position.
    """

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "something makes another loader from the batch sampler of an "
            "AdaptiveDataLoader, as accelerator.prepare(loader) does. That would deal "
            "each global batch out to the replicas once more, and forget its place. "
            "Use the AdaptiveDataLoader itself: it delivers this replica's part."
        )
