"""The order of a loop: from position to data-set index."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elasticrun.data.permutation import Permutation
from elasticrun.data.plan import Order

_NUM_CHECKED = 1000  # Entries of a user's order that its checksum looks at.


def check_sampler(sampler: Any, batch_sampler: Any, *, shuffle: bool) -> None:
    """Refuse what cannot be read at a position.

    Raises:
        TypeError: A sampler that can only be iterated, or a batch sampler.
        ValueError: A sampler with `shuffle=True`.
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
    return lambda positions: np.asarray(
        [int(sampler[position]) for position in positions.tolist()], dtype=np.int64
    )


class EveryPosition:
    """Stands for the sampler where torch wants one: the loader has its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._dataset)))
