"""Ready-made orders: what they draw, and that they are entered anywhere alike."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun import LengthGroups, RandomWindows, WeightedDraws
from elasticrun.data.samplers import Map

keys = st.integers(0, 2**64 - 1)


def taken(order: Map, start: int = 0) -> list[int]:
    """Return an order from a position on, taken in two pieces."""
    middle = (start + len(order)) // 2
    pieces = [np.arange(start, middle), np.arange(middle, len(order))]
    return np.concatenate([order.take(piece) for piece in pieces]).tolist()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=80),
    batch_size=st.integers(1, 9),
    window=st.integers(1, 5),
    key=keys,
)
def test_groups_have_each_sample_once_and_like_lengths(
    lengths: list[int], batch_size: int, window: int, key: int
) -> None:
    groups = LengthGroups(lengths, batch_size, window=window)
    order = taken(groups.keyed(key))
    assert sorted(order) == list(range(len(lengths)))
    half = len(lengths) // 2
    assert taken(groups.keyed(key), half) == order[half:]
    span = window * batch_size
    for start in range(0, len(lengths) // span * span, span):
        # No length lies within the range of another batch of its window.
        own = [lengths[i] for i in order[start : start + span]]
        batches = [own[i : i + batch_size] for i in range(0, span, batch_size)]
        ranges = sorted((min(batch), max(batch)) for batch in batches)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_in_proportion_to_the_weights(replacement: bool) -> None:
    weights = [1.0, 0.0, 2.0, 5.0]
    num = 20_000 if replacement else 1
    draws = WeightedDraws(weights, num, replacement=replacement)
    loops = range(1 if replacement else 3000)
    counts = Counter(i for key in loops for i in taken(draws.keyed(key)))
    assert counts[1] == 0
    for index, weight in enumerate(weights):
        assert counts[index] / counts.total() == pytest.approx(weight / 8, abs=0.03)


def test_without_replacement_no_sample_comes_twice() -> None:
    weights = np.arange(50)  # The first one is 0.
    order = taken(WeightedDraws(weights, replacement=False).keyed(3))
    assert sorted(order) == list(range(1, 50))


@given(length=st.integers(1, 50), window=st.integers(1, 50), key=keys)
def test_windows_lie_within_the_array(length: int, window: int, key: int) -> None:
    if window > length:
        with pytest.raises(ValueError, match="does not lie within an array"):
            RandomWindows(length, window, num_samples=3)
        return
    windows = RandomWindows(length, window, num_samples=500)
    starts = taken(windows.keyed(key))
    assert min(starts) >= 0
    assert max(starts) + window <= length
    assert taken(windows.keyed(key), 100) == starts[100:]


def test_every_window_is_drawn() -> None:
    windows = RandomWindows(10, 3, num_samples=1000)
    counts = Counter(taken(windows.keyed(0)))
    assert sorted(counts) == list(range(8))
    assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.parametrize(
    ("weights", "options", "text"),
    [
        ([], {}, "give one number from 0 up"),
        ([0.0, 0.0], {}, "one above 0 at least"),
        ([[1.0]], {}, "of the shape"),
        ([2.0, -1.0], {}, "negative or not finite"),
        ([1.0, 0.0], {"num_samples": 2, "replacement": False}, "of 1 weights above 0"),
    ],
)
def test_weights_that_are_none_are_refused(
    weights: list[float], options: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        WeightedDraws(weights, **options)


@pytest.mark.parametrize(
    "order",
    [
        WeightedDraws(np.ones(1_000_000)),
        LengthGroups(np.ones(1_000_000), 8),
        RandomWindows(1_000_000, 9, num_samples=1_000_000),
    ],
    ids=lambda order: type(order).__name__,
)
def test_a_loop_is_entered_without_looking_at_all_samples(
    order: WeightedDraws | LengthGroups | RandomWindows,
) -> None:
    places = np.arange(900_000, 900_064)
    order.keyed(2).take(places)  # NumPy imports some of its parts only now.
    tracemalloc.start()
    try:
        order.keyed(3).take(places)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
