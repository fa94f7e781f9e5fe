"""A shuffled order of any length, computed on demand and never stored.

Up to 4096 numbers it is a table, sorted by a keyed hash. Else, for position p:

1. p is a cell, in a row and a column, of a nearly square grid with hardly more cells
   than numbers.
2. Six rounds: the cell moves along its column by a keyed hash of the column, then
   along its row by one of the row, and so on (a Feistel network; Black and Rogaway,
   "Ciphers with arbitrary finite domains", CT-RSA 2002).
3. A cell beyond the last number goes through the rounds again until it is one of the
   numbers (cycle-walking).

Price: 20 ns a number, at 10^4 numbers as at 10^12, where thousands are asked for at
once, and no memory. torch.randperm takes 4 ns at 10^4 and 25 ns at 10^7, 8 bytes each,
and makes all before the first (benchmarks/permutation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.seeding import derive_seed, mix_each

MAX_LENGTH = 2**62
MAX_INDEX = 2**61  # Of a loop without end; what is derived from it fits 64 bits.

# From positions in a loop to indices of the data set, in an array of the same shape.
Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]

# Up to this length the order is a sorted table of 32 KiB at most.
_MAX_TABLE_LENGTH = 4096
# Four rounds leave a pattern between numbers a grid row apart, five leave none that was
# found, and one more is the margin.
_NUM_ROUNDS = 6
# Positions computed at once: their intermediate arrays stay in a core's second cache.
_BLOCK = 1 << 14

# The multipliers of splitmix64 (see elasticrun.checkpoint.seeding).
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)

_Words = NDArray[np.uint64]


class Permutation:
    """The numbers below `length`, in an order that depends on it and `key` alone.

    Thousands are computed for little more than the cost of one, so ask for many at
    once. The order is part of the checkpoint format: a later version gives the same.

    Args:
        length: How many numbers, in [0, 2**62].
        key: Any integer; each gives an unrelated order.
    """

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(
                f"length={length} is outside [0, 2**62]: positions are 64-bit "
                "integers. Give the number of samples."
            )
        self._length = length
        self._table: NDArray[np.int64] | None = None
        if length <= _MAX_TABLE_LENGTH:
            self._table = _sorted_by_hash(length, key)
            return
        num_rows = isqrt(length - 1) + 1
        self._num_rows = np.uint64(num_rows)
        self._num_columns = np.uint64(-(-length // num_rows))
        self._round_keys = [
            np.uint64(derive_seed(key, length, number)) for number in range(_NUM_ROUNDS)
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        """Return the number at one position in [0, length)."""
        return int(self.take(np.array([position]))[0])

    def take(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the numbers at any positions, in an array of the same shape."""
        if positions.size and (positions.min() < 0 or positions.max() >= self._length):
            raise IndexError(
                f"positions {positions.min()} to {positions.max()} of a permutation of "
                f"{self._length} numbers: each must be in [0, length)."
            )
        if self._table is not None:
            return self._table.take(positions)
        flat = positions.reshape(-1)
        numbers = np.empty(flat.size, np.int64)
        for begin in range(0, flat.size, _BLOCK):
            block = flat[begin : begin + _BLOCK].astype(np.uint64)
            numbers[begin : begin + _BLOCK] = self._numbers_at(block)
        return numbers.reshape(positions.shape)

    def _numbers_at(self, positions: _Words) -> _Words:
        """Return the cells that the positions end up in, all below the length."""
        numbers = self._encrypt(positions)
        beyond = np.flatnonzero(numbers >= np.uint64(self._length))
        while beyond.size:
            walked = self._encrypt(numbers[beyond])
            numbers[beyond] = walked
            beyond = beyond[walked >= np.uint64(self._length)]
        return numbers

    def _encrypt(self, cells: _Words) -> _Words:
        """Return the cells after all rounds of the network: a bijection of the grid."""
        rows = cells // self._num_columns
        columns = cells - rows * self._num_columns
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                _rotate(rows, columns, num_places=self._num_rows, key=key)
            else:
                _rotate(columns, rows, num_places=self._num_columns, key=key)
        rows *= self._num_columns
        rows += columns
        return rows


def _rotate(
    moved: _Words, fixed: _Words, *, num_places: np.uint64, key: np.uint64
) -> None:
    """Add to `moved`, modulo `num_places`, a keyed hash of `fixed`, in place."""
    step = fixed ^ key
    step *= _MULTIPLIER_1
    step ^= step >> _HALF
    step *= _MULTIPLIER_2
    step >>= _HALF
    # The 32 bits left are a fraction of the places: Lemire, "Fast random integer
    # generation in an interval", 2019.
    step *= num_places
    step >>= _HALF
    moved += step
    # Where nothing is to be subtracted, the difference wraps round to a huge number.
    np.minimum(moved, moved - num_places, out=moved)


def _sorted_by_hash(length: int, key: int) -> NDArray[np.int64]:
    """Return the numbers below the length sorted by a keyed 64-bit hash.

    NumPy's own shuffles are no choice: their streams may change between versions.
    """
    words = np.arange(length, dtype=np.uint64)
    # Twice, so that two keys never give two windows on one sequence of hashes.
    for number in range(2):
        words ^= np.uint64(derive_seed(key, length, number))
        words = mix_each(words)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
