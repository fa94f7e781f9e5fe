"""Orders are bijections of any length, and no statistic tells them from a shuffle.

The keys are fixed, so that a test of chance gives the same answer every time. Bounds
are four standard deviations or more of what a uniform shuffle gives.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticrun.data.order.permutation import MAX_LENGTH, Permutation

keys = st.integers(-(2**70), 2**70)
short_lengths = st.integers(0, 300) | st.integers(4000, 4200) | st.integers(0, 40_000)
long_lengths = st.integers(4097, MAX_LENGTH) | st.sampled_from(
    [4097, 2**16, 2**16 + 1, 10**12, 2**40 + 1, MAX_LENGTH - 1, MAX_LENGTH]
)

# Lengths on both sides of a grid's corner: 4225 and 99856 are square, the others leave
# a part of the last row to cycle-walking.
MEASURED_LENGTHS = [4000, 4225, 4226, 16_384, 99_856, 100_003]


@given(length=short_lengths, key=keys)
def test_every_number_occurs_once(length: int, key: int) -> None:
    order = Permutation(length, key).take(np.arange(length))
    assert np.array_equal(np.sort(order), np.arange(length))


@given(length=long_lengths, key=keys, data=st.data())
def test_no_number_occurs_twice_at_any_length(
    length: int, key: int, data: st.DataObject
) -> None:
    position = st.integers(0, length - 1)
    positions = data.draw(st.lists(position, unique=True, max_size=50))
    numbers = Permutation(length, key).take(np.array(positions, np.int64))
    assert len(set(numbers.tolist())) == len(positions)
    assert all(0 <= number < length for number in numbers.tolist())


@given(length=short_lengths, key=keys, data=st.data())
def test_the_cut_into_slices_does_not_matter(
    length: int, key: int, data: st.DataObject
) -> None:
    order = Permutation(length, key)
    cuts = data.draw(st.lists(st.integers(0, length), max_size=5).map(sorted))
    bounds = itertools.pairwise([0, *cuts, length])
    pieces = [order.take(np.arange(start, stop)) for start, stop in bounds]
    assert np.array_equal(np.concatenate(pieces), order.take(np.arange(length)))


@given(length=st.integers(1, 5000) | long_lengths, key=keys, data=st.data())
def test_three_ways_to_ask_agree(length: int, key: int, data: st.DataObject) -> None:
    order = Permutation(length, key)
    start = data.draw(st.integers(0, length - 1))
    numbers = order.take(np.arange(start, min(start + 5, length))).tolist()
    positions = np.arange(start, start + len(numbers))
    assert order.take(positions).tolist() == numbers
    assert order.take(positions[::-1, None]).tolist() == [[n] for n in numbers[::-1]]
    assert [order[int(position)] for position in positions] == numbers


@pytest.mark.parametrize(
    ("length", "key", "start", "numbers"),
    [
        (10, 0, 0, [2, 1, 4, 8, 5, 7, 3, 6, 9, 0]),
        (4096, 1, 0, [2283, 563, 1194, 1311, 1443]),
        (4097, 1, 0, [2759, 1202, 2462, 114, 1342]),
        (10**12, 7, 10**11, [967861260365, 313191834304, 447299027314]),
        (2**62, -3, 2**62 - 2, [1229751358339782704, 2378777611964577957]),
    ],
)
def test_values_that_checkpoints_depend_on(
    length: int, key: int, start: int, numbers: list[int]
) -> None:
    order = Permutation(length, key)
    assert order.take(np.arange(start, start + len(numbers))).tolist() == numbers


def test_it_has_a_length() -> None:
    assert len(Permutation(5, 3)) == 5
    assert len(Permutation(MAX_LENGTH, 3)) == MAX_LENGTH


@pytest.mark.parametrize("length", [100, 10**12])
def test_positions_outside_are_refused(length: int) -> None:
    order = Permutation(length, 0)
    for position in (-1, length, 2**70):
        with pytest.raises(IndexError, match=f"of a permutation of {length} numbers"):
            order[position]
    with pytest.raises(IndexError, match="positions -2 to 5 of a permutation"):
        order.take(np.array([5, -2]))


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_lengths_outside_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"length={length} is outside \[0, 2\*\*62\]"):
        Permutation(length, 0)


def test_memory_does_not_grow_with_the_length() -> None:
    def peak(length: int) -> int:
        tracemalloc.start()
        try:
            Permutation(length, 0).take(np.arange(length // 2, length // 2 + 1000))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(10**12) < 1.5 * peak(10**4)
    assert peak(10**12) < 200_000


def orders(length: int, num_keys: int) -> list[NDArray[np.int64]]:
    return [Permutation(length, key).take(np.arange(length)) for key in range(num_keys)]


def chi_squared(xs: NDArray[np.int64], ys: NDArray[np.int64], num_cells: int) -> float:
    """Return how far the points are from even over a board of cells, in deviations."""
    counts, _, _ = np.histogram2d(xs, ys, bins=num_cells)
    sides = [np.histogram(side, bins=num_cells)[0] for side in (xs, ys)]
    expected = np.outer(*sides) / len(xs)
    degrees = (num_cells - 1) ** 2
    total = float(((counts - expected) ** 2 / expected).sum())
    return (total - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("length", MEASURED_LENGTHS)
def test_values_are_spread_evenly_over_positions(length: int) -> None:
    far = [chi_squared(np.arange(length), order, 32) for order in orders(length, 20)]
    assert abs(np.mean(far)) < 4 / 20**0.5
    assert np.max(np.abs(far)) < 4.5


@pytest.mark.parametrize("length", MEASURED_LENGTHS)
def test_neighbours_are_not_correlated(length: int) -> None:
    for order in orders(length, 20):
        scaled = (order - order.mean()) / order.std()
        for distance in (1, 2, int(length**0.5), int(length**0.5) + 1):
            correlation = np.mean(scaled[distance:] * scaled[:-distance])
            assert abs(correlation) * length**0.5 < 4.5


def test_differences_repeat_as_rarely_as_in_a_shuffle() -> None:
    # Of positions one grid column apart: what too few rounds give away first. Each
    # difference modulo the length should occur a Poisson(1) number of times.
    length, num_columns = 4160, 64
    surplus = []
    for order in orders(length, 100):
        differences = (order[num_columns:] - order[:-num_columns]) % length
        counts = np.bincount(differences, minlength=length)
        surplus.append(float((counts**2).sum() / counts.sum() - 1))
    assert abs(np.mean(surplus) - differences.size / length) < 4 * 0.02 / 100**0.5


@pytest.mark.parametrize("length", MEASURED_LENGTHS)
def test_fixed_points_are_poisson_distributed(length: int) -> None:
    num_keys = 60
    counts = [np.sum(order == np.arange(length)) for order in orders(length, num_keys)]
    assert abs(np.mean(counts) - 1) < 4 / num_keys**0.5
    # The fourth central moment of Poisson(1) is 4, so the variance's variance is 3 / n.
    assert abs(np.var(counts) - 1) < 4 * (3 / num_keys) ** 0.5


def num_inversions(order: NDArray[np.int64]) -> int:
    """Return the pairs in the wrong order, counted as merge sort meets them."""
    if len(order) <= 32:
        return int(np.triu(order[:, None] > order[None, :]).sum())
    left, right = np.array_split(order, 2)
    crossing = len(left) * len(right) - np.searchsorted(np.sort(left), right).sum()
    return num_inversions(left) + num_inversions(right) + int(crossing)


@pytest.mark.parametrize("length", [4000, 4226])
def test_half_of_all_pairs_are_inverted(length: int) -> None:
    mean = length * (length - 1) / 4
    deviation = (length * (length - 1) * (2 * length + 5) / 72) ** 0.5
    far = [(num_inversions(order) - mean) / deviation for order in orders(length, 20)]
    assert abs(np.mean(far)) < 4 / 20**0.5
    assert np.max(np.abs(far)) < 4


@pytest.mark.parametrize("length", MEASURED_LENGTHS)
def test_any_bit_of_the_key_changes_the_whole_order(length: int) -> None:
    order = Permutation(length, 12).take(np.arange(length))
    others = [
        Permutation(length, 12 ^ (1 << bit)).take(np.arange(length))
        for bit in [0, 1, 2, 3, 7, 31, 32, 33, 62, 63, 64, 100]
    ]
    for other in others:
        # Two numbers drawn apart are a third of the length apart, with a standard
        # deviation of sqrt(1/18) of it, and equal as often as fixed points occur.
        assert (
            abs(np.mean(np.abs(order - other)) / length - 1 / 3)
            < 4 * (18 * length) ** -0.5
        )
        assert np.sum(order == other) <= 6
        assert abs(chi_squared(order, other, 32)) < 4.5


def test_adjacent_lengths_have_unrelated_orders() -> None:
    for length in (4000, 5000):
        shorter = Permutation(length, 5).take(np.arange(length))
        longer = Permutation(length + 1, 5).take(np.arange(length))
        assert abs(chi_squared(shorter, longer, 32)) < 4


def test_all_orders_of_four_are_equally_frequent() -> None:
    num_keys = 24_000
    counts = Counter(
        Permutation(4, key).take(np.arange(4)).tobytes() for key in range(num_keys)
    )
    assert len(counts) == 24
    expected = num_keys / 24
    total = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(total - 23) < 4 * (2 * 23) ** 0.5


def test_a_position_gets_every_number_equally_often_over_keys() -> None:
    length, num_keys = 4100, 4000
    for position in (0, 4099):
        numbers = [Permutation(length, key)[position] for key in range(num_keys)]
        counts = np.histogram(numbers, bins=41, range=(0, length))[0]
        total = float(((counts - num_keys / 41) ** 2 / (num_keys / 41)).sum())
        assert abs(total - 40) < 4 * 80**0.5


def test_the_start_of_a_huge_order_is_spread_over_all_of_it() -> None:
    length = 10**12 + 39
    numbers = Permutation(length, 0).take(np.arange(2**16))
    assert abs(chi_squared(np.arange(2**16), numbers, 64)) < 4
    low_digits = numbers % 1024
    assert abs(chi_squared(np.arange(2**16), low_digits, 64)) < 4
    # Drawn without order, the gaps between neighbours in size are exponential.
    gaps = np.diff(np.sort(numbers)).astype(np.float64) / (length / 2**16)
    assert abs(np.mean(gaps**2) - 2) < 4 * (20 / 2**16) ** 0.5
