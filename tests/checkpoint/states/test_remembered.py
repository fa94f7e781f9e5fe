"""What is remembered of nested values: which changes are seen, and what comes back."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.states.remembered import (
    Change,
    RememberedValues,
    exact,
    form_of,
    is_whole,
)
from elasticrun.checkpoint.states.values import load_values, save_values

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


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


class Best(NamedTuple):
    epoch: Any
    score: Any


@dataclasses.dataclass
class Meter:
    total: Any
    last: Any = None


FIXED = st.one_of(
    PLAIN,
    *(st.sampled_from(Mode), st.datetimes(), st.timedeltas(), st.times()),
    *(st.dates(), st.text("ab", max_size=2).map(Path)),
    *(st.floats(-1, 1).map(np.float32), st.frozensets(PLAIN, max_size=3)),
)
CHANGING = st.one_of(
    st.sets(FIXED, max_size=3),
    st.lists(st.floats(-1, 1), max_size=3).map(torch.tensor),
    # One without elements has nothing that could change.
    st.lists(st.floats(-1, 1), min_size=1, max_size=3).map(np.array),
    st.dictionaries(KEYS, st.integers(0, 9), max_size=3).map(Counter),
)


def _of_all_kinds(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    rows, tables = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        *(rows, rows.map(tuple), rows.map(lambda row: deque(row, maxlen=4)), tables),
        *(tables.map(OrderedDict), tables.map(lambda each: defaultdict(int, each))),
        *(st.builds(Best, inner, inner), st.builds(Meter, inner, inner)),
    )


ALL_KINDS = st.recursive(st.one_of(FIXED, CHANGING), _of_all_kinds, max_leaves=12)


def objects_in(values: Any) -> Iterator[Any]:
    """Yield everything that may change in place, from the outside in."""
    if isinstance(
        values, dict | list | deque | set | torch.Tensor | np.ndarray | Meter
    ):
        yield values
    if isinstance(values, dict):
        parts: Any = values.values()
    elif isinstance(values, Meter):
        parts = vars(values).values()
    else:
        parts = values if isinstance(values, list | deque | tuple) else ()
    for each in parts:
        yield from objects_in(each)


def change(values: Any, by: Any) -> None:
    """Change an object in place."""
    if isinstance(values, dict):
        values.clear()
        values[9] = by
    elif isinstance(values, list | deque):
        values.appendleft(by) if isinstance(values, deque) else values.insert(0, by)
    elif isinstance(values, set):
        values.add(99)
    elif isinstance(values, Meter):
        values.total, values.new = by, 1  # type: ignore[attr-defined]
    else:
        values += 1


def in_full(values: Any) -> Any:
    """Return something that is equal where all types, orders and values are."""
    if isinstance(values, dict):
        return type(values), [(key, in_full(each)) for key, each in values.items()]
    if isinstance(values, Meter):
        return [(key, in_full(each)) for key, each in vars(values).items()]
    if isinstance(values, list | tuple | deque):
        return type(values), [in_full(each) for each in values]
    if isinstance(values, torch.Tensor | np.ndarray):
        return type(values), values.dtype, values.tolist()
    return type(values), values


@given(before=ALL_KINDS, data=st.data())
def test_values_of_all_kinds_come_back_in_the_same_objects(
    before: Any, data: st.DataObject
) -> None:
    values = {"value": before, "other": [0]}
    wanted, objects = in_full(copy.deepcopy(values)), [*objects_in(values)]
    remembered = RememberedValues(values)
    assert not [*remembered.unknown()]
    assert remembered.compare(values) == Change.NOTHING
    chosen = data.draw(st.lists(st.sampled_from(objects), min_size=1, unique_by=id))
    for each in chosen:
        change(each, data.draw(ALL_KINDS))
    assert remembered.compare(values) == Change.REMEMBERED
    for _ in range(2):
        assert remembered.put_back(values) is values
        assert in_full(values) == wanted
        assert [*map(id, objects_in(values))] == [*map(id, objects)]
        assert remembered.compare(values) == Change.NOTHING


def saved(form: Any) -> Any:
    """Return a form as a checkpoint has it."""
    file = io.BytesIO()
    save_values(form, file)
    file.seek(0)
    return load_values(file)


@given(before=ALL_KINDS, now=ALL_KINDS, place=st.sampled_from(["value", "other"]))
def test_a_form_that_was_saved_puts_values_of_all_kinds_back(
    before: Any, now: Any, place: str
) -> None:
    form = form_of({"value": before})
    assert is_whole(form)
    values = {place: now, "more": now}
    if any(isinstance(each, deque | defaultdict) for each in objects_in(before)):
        values = {"value": before}  # These are not made anew, so others are changed.
        before = copy.deepcopy(before)
        for each in [*objects_in(values)][1:]:
            if isinstance(each, set | torch.Tensor | np.ndarray):
                change(each, 1)
            elif isinstance(each, deque) and len(each) < 4:
                each.append(1)
            elif isinstance(each, defaultdict | Counter):
                each.update(new=1)
    kept = values.get("value")
    assert RememberedValues.of_form(saved(form)).put_back(values) is values
    assert in_full(values) == in_full({"value": before})
    assert exact(form_of(values)) == exact(form)
    if type(before) is type(kept) and type(kept) in (list, dict, set):
        assert values["value"] is kept


def test_what_is_in_no_form_stays_as_it_is() -> None:
    class Local(enum.Enum):
        A = 1

    own, large = object(), torch.ones(2000)
    before = {"a": [own, large, 1], "b": {Local.A: 1}, "c": 1 << 2001, "n": 1}
    form = form_of(before)
    assert not is_whole(form)
    now = {"a": [2, large, 2], "b": 3, "c": 4, "n": 2}
    assert RememberedValues.of_form(saved(form)).put_back(now) is now
    assert (now["a"][0], now["a"][2]) == (2, 1)  # type: ignore[index]
    assert (now["b"], now["c"], now["n"]) == (3, 4, 1)


def test_what_does_not_fit_stays_as_it_is() -> None:
    now = {"lr": 0.1, "betas": (0.9, 0.99), "step": torch.ones(1)}
    for wrong in ("text", [1], {}, torch.zeros(3), None, {1}, Mode.TRAIN):
        form = form_of(dict.fromkeys([*now, "other"], wrong))
        found = RememberedValues.of_form(form).put_back(dict(now), is_free=False)
        assert found == now


@pytest.mark.parametrize(
    "form",
    [
        *("text", {}, [], (), ("builtins:list",), ("builtins:list", None)),
        *(("builtins:eval", ("1",)), ("builtins:type", ("x", (), {}))),
        *(("os:system", ("true",)), ("no.such:thing", ()), ("", ()), (1, ())),
        *(("numpy:ndarray", ("|O", (1,), bytes(8))), ("numpy:ndarray", ())),
        ("torch:Tensor", ("torch.float32", (3,), bytes(8))),
        ("torch:Tensor", ("torch.nn", (3,), bytes(8))),
        *((f"{__name__}:Mode", (7,)), (f"{__name__}:Mode.TRAIN", (7,))),
        *(("builtins:dict", {set: 1}), ("builtins:set", (("builtins:list", ()),))),
    ],
)
def test_what_is_no_form_puts_nothing_back(form: Any) -> None:
    now = {"a": 1}
    for is_free in (True, False):
        read = RememberedValues.of_form(("builtins:dict", {"a": form}))
        assert read.put_back(dict(now), is_free=is_free) in (now, {"a": form})


def test_what_cannot_be_copied_is_named() -> None:
    own = {"a": [1, {"draws": np.random.default_rng(0)}], "b": np.array([None])}
    kinds = [("a.1.draws", np.random.Generator), ("b", np.ndarray)]
    assert [*RememberedValues(own).unknown()] == kinds


def in_order(values: Any) -> Any:
    """Return something that is equal only where types and orders are."""
    if isinstance(values, dict):
        return [(key, in_order(each)) for key, each in values.items()]
    if isinstance(values, list | tuple):
        return type(values), [in_order(each) for each in values]
    return type(values), values


@given(before=st.dictionaries(KEYS, NESTED), after=st.dictionaries(KEYS, NESTED))
def test_plain_values_come_back_from_whatever_they_became(
    before: dict[Any, Any], after: dict[Any, Any]
) -> None:
    values = copy.deepcopy(before)
    inner = list(values.values())
    remembered = RememberedValues(values)
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
        (deque([1]), lambda value: None, Change.NOTHING),
        (object(), lambda value: None, Change.MORE),
    ],
)
def test_which_changes_are_seen(
    value: Any, change: Callable[[Any], object], seen: Change
) -> None:
    values = {"value": value, "other": 1}
    remembered = RememberedValues(values)
    change(value)
    assert remembered.compare(values) == seen
    remembered.put_back(values)
    if seen != Change.MORE:
        assert remembered.compare(values) == Change.NOTHING


def test_another_tensor_in_its_place_is_a_change() -> None:
    first = torch.zeros(3)
    values = {"value": first}
    remembered = RememberedValues(values)
    values["value"] = torch.ones(3)
    assert remembered.compare(values) == Change.REMEMBERED
    remembered.put_back(values)
    assert values["value"] is first
    assert first.tolist() == [0.0] * 3


def test_what_is_not_remembered_stays_as_it_is_now() -> None:
    values: dict[str, Any] = {"large": torch.zeros(9999), "own": object(), "n": 1}
    remembered = RememberedValues(values)
    loaded = torch.ones(9999)
    own = object()
    values.update(large=loaded, own=own, n=2)
    remembered.put_back(values)
    assert values["large"] is loaded
    assert (values["own"], values["n"]) == (own, 1)


def test_values_that_contain_themselves_are_no_trouble() -> None:
    values: dict[str, Any] = {"n": 1}
    values["self"] = values
    remembered = RememberedValues(values)
    assert remembered.compare(values) == Change.MORE
    values["n"] = 2
    remembered.put_back(values)
    assert values["n"] == 1


def test_many_short_lists_are_too_much_for_a_boundary() -> None:
    few, many = ([{"a": [0] * 60} for _ in range(n)] for n in (100, 600))
    assert not [*RememberedValues(few, is_short=True).unknown()]
    assert [*RememberedValues(many, is_short=True).unknown()]
    assert not [*RememberedValues(many).unknown()]
