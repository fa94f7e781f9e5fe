"""What is remembered of nested values: which changes are seen, and what comes back."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.states.replayed import Change, Remembered

PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(0, 2), st.text(max_size=2)),
    st.floats(allow_nan=False, min_value=0.5),
)
KEYS = st.integers(0, 3)
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def in_order(values: Any) -> Any:
    """Return something that is equal only where types are, whatever a dict's order."""
    if isinstance(values, dict):
        return [(key, in_order(values[key])) for key in sorted(values)]
    if isinstance(values, list | tuple):
        return type(values), [in_order(each) for each in values]
    return type(values), values


@given(before=st.dictionaries(KEYS, NESTED), after=st.dictionaries(KEYS, NESTED))
def test_plain_values_come_back_from_whatever_they_became(
    before: dict[Any, Any], after: dict[Any, Any]
) -> None:
    values = copy.deepcopy(before)
    inner = list(values.values())
    remembered = Remembered(values)
    values.clear()
    values.update(after)
    is_same = in_order(after) == in_order(before)
    assert (remembered.compare(values) == Change.NOTHING) == is_same
    assert remembered.put_back(values) is values
    assert in_order(values) == in_order(before)
    lists = [each for each in inner if isinstance(each, list)]
    assert all(any(each is now for now in values.values()) for each in lists)


@pytest.mark.parametrize(
    ("value", "change", "seen"),
    [
        ([float("nan")], lambda value: None, Change.NOTHING),
        (float("nan"), lambda value: None, Change.NOTHING),
        ([[1, 2], "a"], lambda value: value[0].append(3), Change.REMEMBERED),
        (OrderedDict(a=[[]]), lambda value: value["a"].pop(), Change.REMEMBERED),
        ([1], lambda value: value.__setitem__(0, True), Change.REMEMBERED),
        (np.zeros(3), lambda value: value.__iadd__(1), Change.REMEMBERED),
        (np.zeros(3), lambda value: None, Change.NOTHING),
        (torch.zeros(3), lambda value: value.add_(1), Change.REMEMBERED),
        (torch.zeros(3), lambda value: value[:1].fill_(1), Change.REMEMBERED),
        (torch.zeros(3), lambda value: None, Change.NOTHING),
        (torch.zeros(9999), lambda value: value.add_(1), Change.MORE),
        (torch.zeros(9999), lambda value: value.numpy(), Change.NOTHING),
        (torch.zeros(9, device="meta"), lambda value: None, Change.MORE),
        (torch.eye(3).to_sparse(), lambda value: None, Change.MORE),
        (np.zeros(9999), lambda value: None, Change.MORE),
        (deque([1]), lambda value: None, Change.MORE),
        (object(), lambda value: None, Change.MORE),
    ],
)
def test_which_changes_are_seen(
    value: Any, change: Callable[[Any], object], seen: Change
) -> None:
    values = {"value": value, "other": 1}
    remembered = Remembered(values)
    change(value)
    assert remembered.compare(values) == seen
    remembered.put_back(values)
    if seen != Change.MORE:
        assert remembered.compare(values) == Change.NOTHING


def test_another_tensor_in_its_place_is_a_change() -> None:
    first = torch.zeros(3)
    values = {"value": first}
    remembered = Remembered(values)
    values["value"] = torch.ones(3)
    assert remembered.compare(values) == Change.REMEMBERED
    remembered.put_back(values)
    assert values["value"] is first
    assert first.tolist() == [0.0] * 3


def test_what_is_not_remembered_stays_as_it_is_now() -> None:
    values: dict[str, Any] = {"large": torch.zeros(9999), "queue": deque([1]), "n": 1}
    remembered = Remembered(values)
    loaded = torch.ones(9999)
    values.update(large=loaded, queue=deque([2]), n=2)
    remembered.put_back(values)
    assert values["large"] is loaded
    assert (list(values["queue"]), values["n"]) == ([2], 1)


def test_values_that_contain_themselves_are_no_trouble() -> None:
    values: dict[str, Any] = {"n": 1}
    values["self"] = values
    remembered = Remembered(values)
    assert remembered.compare(values) == Change.MORE
    values["n"] = 2
    remembered.put_back(values)
    assert values["n"] == 1
