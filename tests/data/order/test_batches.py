"""A plan of batches is three functions that agree, and enter it anywhere at once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrun.data.order.batches import (
    Batches,
    ListedBatches,
    Passes,
    SizedBatches,
    SizePlan,
)
from elasticrun.data.order.permutation import MAX_INDEX, Permutation

sizes = st.integers(1, 30)
lengths = st.integers(0, 200)
size_plans = st.builds(
    lambda first, later: ((0, first), *sorted(later.items())),
    sizes,
    st.dictionaries(st.integers(1, 300), sizes, max_size=5),
)


def sizes_by_hand(plan: SizePlan, num_samples: int, seen: int) -> list[int]:
    """Return the sizes that a loop finds which looks into the plan at each batch."""
    found, index = [], 0
    while index < num_samples:
        size = [s for samples, s in plan if samples <= seen + index][-1]
        found.append(min(size, num_samples - index))
        index += size
    return found


def check(batches: Batches, expected: list[int], *, steps: list[int]) -> None:
    """Check all functions against the sizes, and how far each batch moves the index."""
    assert len(batches) == len(expected)
    starts = list(accumulate(steps, initial=0))
    numbers = range(len(expected))
    assert [batches.size(number) for number in numbers] == expected
    assert [batches.start(number) for number in numbers] == starts[:-1]
    for number, (start, end) in enumerate(pairwise(starts)):
        assert batches.number_at(start) == number
        for index in range(start + 1, end + 1):
            assert batches.number_at(index) == number + 1
        count = batches.num_alike(number)
        assert count >= 1
        assert set(expected[number : number + count]) == {expected[number]}


@given(plan=size_plans, num_samples=lengths, seen=st.integers(0, 300))
@example(((0, 4), (5, 3), (6, 2)), 11, 0)  # A size that no batch comes to.
def test_sizes_by_plan(plan: SizePlan, num_samples: int, seen: int) -> None:
    expected = sizes_by_hand(plan, num_samples, seen)
    check(SizedBatches(plan, num_samples, seen), expected, steps=expected)
    # How a loop over the data that went before is cut into loops does not show.
    endless = SizedBatches(plan, MAX_INDEX, seen)
    assert [endless.size(n) for n in range(len(expected) - 1)] == expected[:-1]


@given(plan=size_plans, num_samples=lengths, seen=st.integers(0, 300))
def test_dropping_the_last_batch_leaves_out_only_one_that_is_not_full(
    plan: SizePlan, num_samples: int, seen: int
) -> None:
    whole = sizes_by_hand(plan, num_samples, seen)
    # With one sample more, only a batch that is not full becomes another one.
    is_full = sizes_by_hand(plan, num_samples + 1, seen)[: len(whole)] == whole
    kept = whole if is_full else whole[:-1]
    batches = SizedBatches(plan, num_samples, seen, drop_last=True)
    check(batches, kept, steps=kept)


@given(num_samples=lengths, size=sizes)
def test_equal_sizes(num_samples: int, size: int) -> None:
    expected = sizes_by_hand(((0, size),), num_samples, 0)
    check(SizedBatches(((0, size),), num_samples), expected, steps=expected)


@given(own=st.lists(sizes, max_size=9))
def test_sizes_of_lists(own: list[int]) -> None:
    check(ListedBatches(len(own), own.__getitem__), own, steps=[1] * len(own))


@given(
    length=st.integers(1, 60),
    start=st.integers(0, 300),
    num=st.integers(0, 300),
    far=st.sampled_from([0, 10**12]),
)
def test_passes_follow_one_another(length: int, start: int, num: int, far: int) -> None:
    def order(number: int) -> Permutation:
        return Permutation(length, number)

    far *= length
    expected = [
        order(far // length + place // length)[place % length]
        for place in range(start, start + num)
    ]
    places = np.arange(start, start + num) + far
    assert Passes(length, lambda n: order(n).take)(places).tolist() == expected
