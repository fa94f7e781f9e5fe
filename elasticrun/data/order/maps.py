"""Reads what a user gives as `sampler=` or `batch_sampler=`: a map."""

from __future__ import annotations

import contextlib
import functools
import operator
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

from elasticrun.data.order.permutation import Order

_WHAT_A_SAMPLER_IS = (
    "Give the data-set indices themselves, whole numbers in one dimension; of weights "
    "torch.multinomial(weights, num_samples, generator=...), of a mask "
    "mask.nonzero().flatten()."
)


def check_sampler(
    sampler: Any, batch_sampler: Any, *, shuffle: bool, batch_size: Any, drop_last: bool
) -> None:
    """Refuse what cannot be read at a position, and what excludes each other."""
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


def _check_map(given: Any, name: str) -> None:
    """Refuse what has no length, or can only be iterated; say what to write instead."""
    kind = type(given).__name__
    if (line := _line_for(given)) is not None:
        raise TypeError(
            f"{name}={kind} draws its order while it is iterated. So a loop could not "
            "resume in the middle without drawing everything again, and replicas could "
            f"not share it. Write instead: {line}"
        )
    is_map = any(hasattr(given, n) for n in ("keyed", "take", "__getitem__"))
    if not (hasattr(given, "__len__") and is_map):
        raise TypeError(
            f"{name}={kind} has no length, or cannot be read at a position. So a loop "
            "could not resume in the middle without drawing everything again. Draw the "
            "order in advance and give it as a list or array: "
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


def batch_at(batch_sampler: Any, number: int) -> NDArray[np.int64]:
    """Return one of the user's batches, which may be empty."""
    batch = batch_sampler[number]
    if not hasattr(batch, "__len__"):
        raise TypeError(
            f"batch {number} of batch_sampler={type(batch_sampler).__name__} is "
            f"{batch!r}, but a batch is a list of data-set indices. An order of single "
            "samples is given as sampler=, with a batch_size."
        )
    what = f"batch {number} of batch_sampler={type(batch_sampler).__name__}"
    return _array_of(batch if len(batch) else [], what)  # An empty one has any type.


def as_map(sampler: Any) -> Any:
    """Return what an order is taken from: a map of many positions at once.

    That is the sampler itself, if it has `keyed` or `take`; else an array of what it
    holds.
    """
    is_array = isinstance(sampler, (torch.Tensor, np.ndarray))
    if not is_array and (hasattr(sampler, "keyed") or hasattr(sampler, "take")):
        return sampler
    return _array_of(sampler, f"sampler={type(sampler).__name__}")


def order_of_map(sampler: Any, *, key: int) -> Order:
    """Return the order that a map is.

    Args:
        sampler: What `as_map` returned.
        key: For a map that has another order in each loop (`keyed`).
    """
    if hasattr(sampler, "keyed"):
        sampler = as_map(sampler.keyed(key))
    if isinstance(sampler, np.ndarray):
        return sampler.take
    return functools.partial(_taken, sampler)


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


def _array_of(given: Any, what: str) -> NDArray[np.int64]:
    """Return the data-set indices that a sequence, a tensor or an array holds."""
    if isinstance(given, torch.Tensor):
        given = given.cpu().numpy()
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise TypeError(
                f"{what} of {given.dtype} with the shape {given.shape} is no order. "
                f"{_WHAT_A_SAMPLER_IS}"
            )
        return given.astype(np.int64)
    entries = (_index_at(given, position, what) for position in range(len(given)))
    return np.fromiter(entries, np.int64, len(given))


def _index_at(given: Any, position: int, what: str) -> int:
    """Return the index at a position; not with `int`, which makes weights to 0."""
    entry = given[position]
    with contextlib.suppress(TypeError):
        if not isinstance(entry, bool):
            return operator.index(entry)
    raise TypeError(
        f"{what} is no order: at position {position} it has {entry!r}. "
        f"{_WHAT_A_SAMPLER_IS}"
    )


class NoBatchSampler:
    """Stands for the loader's batch sampler, and refuses to be taken for one.

    Others make a loader of their own from it, as `accelerator.prepare` does; that one
    would deal each batch out once more, and have neither order nor position.
    """

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "something makes another loader from the batch sampler of an "
            "AdaptiveDataLoader, as accelerator.prepare(loader) does. That would split "
            "each global batch among the replicas a second time, and lose the "
            "position. Use the AdaptiveDataLoader itself: it delivers this replica's "
            "part."
        )
