"""The order of a loop: from position to data-set index."""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elasticrun.data.permutation import Permutation
from elasticrun.data.plan import Order

_WHAT_A_SAMPLER_IS = (
    "Give the data-set indices themselves, whole numbers in one dimension; of weights "
    "torch.multinomial(weights, num_samples, generator=...), of a mask "
    "mask.nonzero().flatten()."
)
_NUM_CHECKED = 1000  # Entries of a user's order that its checksum looks at.


def check_sampler(sampler: Any, batch_sampler: Any, *, shuffle: bool) -> None:
    """Refuse what cannot be read at a position.

    Raises:
        TypeError: A sampler that can only be iterated, or whose entries are no indices;
            or a batch sampler.
        ValueError: A sampler with `shuffle=True`, or an empty one.
    """
    if batch_sampler is not None:
        raise TypeError(
            f"batch_sampler={type(batch_sampler).__name__} cannot be used: its batches "
            "come in a sequence that cannot be entered in the middle, nor shared out "
            "among another number of replicas. Give batch_size=, and the order as "
            "sampler=, a list of indices for instance."
        )
    if sampler is None:
        return
    if shuffle:
        raise ValueError(
            "sampler= and shuffle=True exclude each other: the sampler is the order. "
            "Leave one of them out."
        )
    if not (hasattr(sampler, "__len__") and hasattr(sampler, "__getitem__")):
        raise TypeError(
            f"sampler={type(sampler).__name__} can only be iterated, so a loop could "
            "not resume in its middle without drawing everything before it again. Draw "
            "the order in advance and give it as a list or array: "
            "sampler=list(your_sampler), made from a fixed seed."
        )
    if len(sampler) == 0:
        raise ValueError(
            f"the sampler ({type(sampler).__name__}) is empty, so no loop can deliver "
            "anything. Look at how it was made."
        )
    if isinstance(sampler, (torch.Tensor, np.ndarray)):
        _check_array(sampler)
    else:
        _indices_at(sampler, [0])


def order_of(num_samples: int, sampler: Any, *, key: int | None) -> Order:
    """Return the function from positions to indices.

    Args:
        num_samples: The length of the order.
        sampler: A map from position to index, or None.
        key: What a shuffled order depends on; None for the order of the data set.
    """
    if sampler is not None:
        return _order_of_map(sampler)
    if key is not None:
        return Permutation(num_samples, key).take
    return _unchanged


def checksum_of_map(sampler: Any) -> int:
    """Return a checksum of an order that the user gave, from entries all over it."""
    num_samples = len(sampler)
    step = max(1, num_samples // _NUM_CHECKED)
    positions = np.arange(0, num_samples, step, dtype=np.int64)
    return zlib.crc32(_order_of_map(sampler)(positions).astype("<i8").tobytes())


def _unchanged(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


def _order_of_map(sampler: Any) -> Order:
    if isinstance(sampler, torch.Tensor):
        sampler = sampler.cpu().numpy()
    if isinstance(sampler, np.ndarray):
        array = sampler
        return lambda positions: array[positions].astype(np.int64)
    return lambda positions: _indices_at(sampler, positions.tolist())


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


class EveryPosition:
    """Stands for the sampler where torch wants one: the loader has its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._dataset)))
