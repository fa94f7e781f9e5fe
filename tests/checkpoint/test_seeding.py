"""Seeds are stable over versions, and differ wherever their parts do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        # The first output of splitmix64 from state 0, as published.
        ((), 0xE220A8397B1DCDAF),
        ((0,), 6791897765849424158),
        ((-1,), 13608149317741381227),
        ((0, 0), 1825907084063272085),
        ((1, 2, 3), 9014820325736370863),
        ((3, 2, 1), 3431508572261335562),
        ((2**64,), 3409504848988561229),
        ((-(2**200), 7), 7661944195927048016),
    ],
)
def test_values_that_checkpoints_depend_on(parts: tuple[int, ...], seed: int) -> None:
    assert derive_seed(*parts) == seed


def test_different_tuples_give_different_64_bit_seeds() -> None:
    numbers = [0, 1, -1, 2, -2, 2**62, 2**63, 2**64, -(2**63), -(2**64), 2**126, 2**200]
    tuples = [
        parts
        for length in range(4)
        for parts in itertools.product(numbers, repeat=length)
    ]
    seeds = {derive_seed(*parts) for parts in tuples}
    assert len(seeds) == len(tuples)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_each_bit_of_a_part_changes_half_of_the_seed() -> None:
    flips = [
        (derive_seed(7, number) ^ derive_seed(7, number ^ (1 << bit))).bit_count()
        for number in range(50)
        for bit in range(70)
    ]
    # The mean of 3500 draws with standard deviation 4.
    assert abs(np.mean(flips) - 32) < 4 * 4 / 3500**0.5


def test_an_integer_of_numpy_counts_as_its_value() -> None:
    assert derive_seed(*np.array([-5, 3])) == derive_seed(-5, 3)


def test_a_float_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        derive_seed(1, 2.0)  # type: ignore[arg-type]


def test_many_at_once_are_those_of_one_at_a_time() -> None:
    numbers = [0, 1, 77, 2**31, 2**61 + 5, 2**62 - 1]
    for key in (0, -1, 2**64 - 1, 2**70):
        seeds = derive_seeds(key, np.array(numbers, dtype=np.int64))
        assert seeds.tolist() == [derive_seed(key, number) for number in numbers]
