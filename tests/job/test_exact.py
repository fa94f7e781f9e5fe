"""Exact sums: equal to rational arithmetic, in any order and grouping."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrun.job.exact import ExactSum

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.lists(st.one_of(FLOATS, st.integers()), max_size=20)


def sum_of(numbers: list[float | int]) -> ExactSum:
    total = ExactSum()
    for number in numbers:
        total.add(number)
    return total


@given(NUMBERS)
@example([2.0**1023, 2.0**1023])
@example([-(2.0**1023), -(2.0**1023)])
def test_the_sum_is_rounded_once(numbers: list[float | int]) -> None:
    exact = sum(map(Fraction, numbers), Fraction())
    value = sum_of(numbers).value
    if all(isinstance(number, int) for number in numbers):
        assert value == exact
        assert isinstance(value, int)
    else:
        try:
            assert value == float(exact)
        except OverflowError:
            assert value == (math.inf if exact > 0 else -math.inf)


@given(NUMBERS, st.randoms(), st.integers(0, 20))
def test_neither_order_nor_grouping_matters(
    numbers: list[float | int], random: object, cut: int
) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [sum_of(shuffled[:cut]), sum_of(shuffled[cut:])]
    total = ExactSum()
    for part in parts:
        total.merge(ExactSum.decode(json.loads(json.dumps(part.encode()))))
    assert total.encode() == sum_of(numbers).encode()


@given(NUMBERS)
def test_what_is_subtracted_is_gone(numbers: list[float | int]) -> None:
    total = sum_of([*numbers, 0.1])
    for number in numbers:
        total.add(number, sign=-1)
    assert total.value == 0.1


def test_infinities_and_nan_act_as_in_floating_point() -> None:
    assert sum_of([1.0, math.inf]).value == math.inf
    assert math.isnan(sum_of([math.inf, -math.inf]).value)
    kept = ExactSum.decode(json.loads(json.dumps(sum_of([math.nan]).encode())))
    assert math.isnan(kept.value)


@pytest.mark.parametrize(
    "one",
    [
        True,
        np.int64(1),
        np.float32(1),
        np.ones(1),
        torch.ones(()),
        torch.ones(1, 1, dtype=torch.int64),
        torch.ones((), requires_grad=True),
    ],
)
def test_one_element_is_a_number(one: object) -> None:
    assert ExactSum.of(one).value == 1


@pytest.mark.parametrize("other", ["1", None, 1j, torch.ones(2), np.zeros(0), [1]])
def test_anything_else_is_refused(other: object) -> None:
    with pytest.raises(TypeError, match="is not one real number"):
        ExactSum.of(other)
