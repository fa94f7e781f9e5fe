"""Small values of states as they were at several places, in a form that is saved.

A form holds plain values, lists, tuples, dictionaries and small tensors; an empty set
stands for what is not noted, which stays as it is when the rest is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elasticrun.checkpoint.states.expected import MAPPING, Kind, check_values
from elasticrun.checkpoint.states.remembered import (
    DICTIONARIES,
    MOST_COPIED,
    is_counted,
)
from elasticrun.checkpoint.states.values import SHARDED_KINDS

# Finished epochs and loops, and whether an epoch is running.
Place = tuple[int, int, bool]
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MOST_PLACES = 1000
_MOST_VALUES = 1 << 14  # In one container.
_DEEPEST = 32
_MISSING = object()
_PLACE = Kind(
    "a place of the program",
    lambda place: type(place) is tuple and [*map(type, place)] == [int, int, bool],
)


class Noted:
    """What was noted at the places of an epoch, or outside of epochs, by names.

    A place holds what has changed since the one before it. Above a bound it holds
    nothing at all.

    Args:
        most_bytes: The bound; another one is a thousand places.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # Never changed in place: see `remember`. None above the bound.
        self._places: tuple[tuple[Place, dict[str, Any]], ...] | None = ()

    def clear(self) -> None:
        """Begin anew."""
        self._places = ()

    @property
    def is_over(self) -> bool:
        """Whether it was too much."""
        return self._places is None

    def add(self, place: Place, forms: dict[str, Any]) -> None:
        """Note forms at a place; forget later ones, which the program comes to anew."""
        if self._places is None:
            return
        self._places = tuple(each for each in self._places if each[0] < place)
        before = self.at(self._places[-1][0]) if self._places else {}
        changed = {
            name: form
            for name, form in forms.items()
            if not is_same(before.get(name, _MISSING), form)
        }
        self._places = (*self._places, (place, changed))
        is_many = len(self._places) > _MOST_PLACES
        if is_many or size_of([each for _, each in self._places]) > self._most_bytes:
            self._places = None

    def at(self, place: Place) -> dict[str, Any]:
        """Return all that is known of a place; nothing if it was not noted."""
        known: dict[str, Any] = {}
        for each, changed in self._places or ():
            known |= changed
            if each == place:
                return known
        return {}

    def remember(self) -> Callable[[], None]:
        """Return what puts back what is noted now."""
        places = self._places

        def put_back() -> None:
            self._places = places

        return put_back

    def encode(self) -> Any:
        return self._places

    def decode(self, values: Any, *, name: str) -> None:
        """Take what `encode` has returned.

        Raises:
            CheckpointError: It is something else.
        """
        if values is not None:
            check_values(values, [(_PLACE, MAPPING)], name=name)
            values = tuple(map(tuple, values))
        self._places = values


def form_of(value: Any, depth: int = 0) -> Any:
    """Return the form of a value."""
    kind = type(value)
    is_number = isinstance(value, np.generic) and not isinstance(value, np.void)
    if kind in _PLAIN or is_number:
        return value
    if kind in (list, tuple, *DICTIONARIES):
        if len(value) > _MOST_VALUES or depth >= _DEEPEST:
            return set()
        if kind in (list, tuple):
            return kind(form_of(each, depth + 1) for each in value)
        if not _PLAIN.issuperset(map(type, value)):
            return set()
        return {key: form_of(each, depth + 1) for key, each in value.items()}
    return value.detach().clone() if _is_small(value) else set()


def put_back(value: Any, form: Any, *, is_free: bool) -> Any:
    """Return a value as its form has it; containers and tensors change in place.

    Args:
        is_free: Whether keys, lengths, shapes and kinds may change, too. If not, what
            does not fit stays as it is.
    """
    if type(form) is set:
        return value
    if type(form) is dict and type(value) in DICTIONARIES:
        return _put_back_items(value, form, is_free=is_free)
    if type(form) is type(value) and type(form) in (list, tuple):
        return _put_back_row(value, form, is_free=is_free)
    if isinstance(form, torch.Tensor) and value is not _MISSING:
        return _put_back_tensor(value, form, is_free=is_free)
    is_new = is_free and (form is None or value is None or value is _MISSING)
    kinds = {type(form), type(value)}
    return _new(form) if is_new or len(kinds) == 1 or kinds <= {int, float} else value


def _put_back_items(value: Any, form: Any, *, is_free: bool) -> Any:
    if is_free and [*value] != [*form]:
        before = dict(value)
        value.clear()
        for key in form:  # `Counter.update` would add.
            value[key] = before.get(key, _MISSING)
    for key in [*value]:
        if key in form:
            value[key] = put_back(value[key], form[key], is_free=is_free)
        if value[key] is _MISSING:
            del value[key]
    return value


def _put_back_row(value: Any, form: Any, *, is_free: bool) -> Any:
    if len(form) != len(value) and not is_free:
        return value
    values = [*value, *[_MISSING] * len(form)][: len(form)]
    rows = zip(values, form, strict=True)
    now = [put_back(each, then, is_free=is_free) for each, then in rows]
    now = [each for each in now if each is not _MISSING]
    if type(form) is tuple:
        return tuple(now)
    value[:] = now
    return value


def _put_back_tensor(value: Any, form: torch.Tensor, *, is_free: bool) -> Any:
    if _is_small(value) and (value.shape, value.dtype) == (form.shape, form.dtype):
        if not is_same(value.detach().cpu(), form):  # Else it would count as changed.
            with torch.no_grad():
                value.copy_(form)
        return value
    is_alike = isinstance(value, torch.Tensor) and value.dtype == form.dtype
    return form.clone() if is_free and is_alike else value


def without(form: Any, before: Any, after: Any) -> Any:
    """Return a form without what differs between two others."""
    if is_same(before, after):
        return form
    if type(form) is type(before) is type(after) is dict:
        return {
            key: without(each, before.get(key, _MISSING), after.get(key, _MISSING))
            for key, each in form.items()
        }
    is_row = type(form) is type(before) is type(after) and type(form) in (list, tuple)
    if is_row and len(form) == len(before) == len(after):
        return type(form)(map(without, form, before, after))
    return set()


def is_same(one: Any, other: Any) -> bool:
    """Return whether two forms are the same; those on a GPU are taken for changed."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        is_here = one.device.type == other.device.type == "cpu"
        return is_alike and is_here and torch.equal(one, other)
    if type(one) is dict:
        return [*one] == [*other] and all(is_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other or (one != one and other != other))


def size_of(form: Any) -> int:
    """Return how many bytes a form has, about."""
    if isinstance(form, torch.Tensor):
        return form.nbytes
    if isinstance(form, dict):
        return sum(map(size_of, form.values()))
    if isinstance(form, (list, tuple)):
        return sum(map(size_of, form))
    return len(form) if isinstance(form, (str, bytes)) else 8


def _new(form: Any) -> Any:
    """Return a value of a form for which there is none to change."""
    if type(form) is dict:
        items = ((key, _new(each)) for key, each in form.items())
        return {key: each for key, each in items if each is not _MISSING}
    if type(form) in (list, tuple):
        return type(form)(v for v in map(_new, form) if v is not _MISSING)
    if isinstance(form, torch.Tensor):
        return form.clone()
    return _MISSING if type(form) is set else form


def _is_small(value: Any) -> bool:
    is_whole = type(value).__name__ not in SHARDED_KINDS
    return is_counted(value) and is_whole and value.numel() <= MOST_COPIED
