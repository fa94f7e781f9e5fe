"""Seeds made of epoch, loop and other numbers of a position."""

from __future__ import annotations

from operator import index as exact_int

import numpy as np
from numpy.typing import NDArray

_MASK_64 = (1 << 64) - 1
_MASK_63 = (1 << 63) - 1

# The increment and the finaliser of splitmix64: Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014; its multipliers and shifts
# are variant 13 of David Stafford, "Better bit mixing", 2011.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def derive_seed(*parts: int) -> int:
    """Return a 64-bit hash of the integers, of any size and sign, in this order.

    `derive_seed(seed, epoch, index)` and the like give unrelated streams of random
    numbers to places that are numbered alike. Different tuples give different seeds but
    for the chance collisions of a 64-bit hash, also when they differ in length or order
    only. It is no cryptographic hash.

    The values are part of the checkpoint format: a later version of elasticrun derives
    the same ones, or a resumed loop would continue in another order.
    """
    state = _mix(len(parts))
    for part in parts:
        state = _absorb(state, part)
    return state


def derive_seeds(key: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return `derive_seed(key, number)` for each number in [0, 2**62), of any shape."""
    # The number's zigzag form above a zero bit, as in `_absorb`.
    words = numbers.astype(np.uint64) << np.uint64(2)
    words ^= np.uint64(_absorb(_mix(2), key))
    return mix_each(words)


def mix_each(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return each word after one step of splitmix64; the given ones change, too."""
    words += np.uint64(_GOLDEN_GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    return words


def _absorb(state: int, part: int) -> int:
    number = exact_int(part)
    # Zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    rest = number << 1 if number >= 0 else ~(number << 1)
    # 63 bits at a time, above a bit that says whether more follow, so that no two
    # tuples of one length are the same sequence of words.
    while rest > _MASK_63:
        state = _mix(state ^ ((rest & _MASK_63) << 1 | 1))
        rest >>= 63
    return _mix(state ^ (rest << 1))


def _mix(word: int) -> int:
    """Return one step of splitmix64, a bijection of the 64-bit words."""
    word = (word + _GOLDEN_GAMMA) & _MASK_64
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK_64
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK_64
    return word ^ (word >> 31)
