"""Copies the small values of a state, tells what has changed of them, restores them."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch

from elasticrun.checkpoint.states.module_memory import first_of
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.checkpoint.states.values import SHARDED_KINDS

MOST_COPIED = 1 << 10  # Elements of a tensor or an array; most that count are small.
_MOST_VALUES = 1 << 14  # In one container, if not all of them are plain.
_DEEPEST = 32  # Deeper values may contain themselves.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
DICTIONARIES = frozenset({dict, OrderedDict, defaultdict, Counter})
_ROWS = frozenset({list, tuple, deque, set, frozenset})
# What else never changes in place; with subclasses.
_FIXED = (
    *(np.generic, enum.Enum, pathlib.PurePath, type, types.FunctionType),
    *(types.BuiltinFunctionType, range, torch.Size, torch.dtype, torch.device),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
_MISSING = object()


class Change(enum.IntEnum):
    """What has changed: nothing, what is remembered, or more."""

    NOTHING = 0
    REMEMBERED = 1
    MORE = 2  # It has to be loaded again.


class Remembered:
    """Nested values as they were at one moment.

    Numbers, text, and small tensors and arrays are copied, in any of Python's
    containers and in dataclasses. Of large tensors only the storage, torch's count of
    changes in place and, on CPUs, the first elements are remembered, which see every
    change but one of other elements through `tensor.data`. Anything else counts as
    changed; `unknown` tells what that is.
    """

    def __init__(self, values: Any) -> None:
        self._content = _remember(values, 0)

    def compare(self, values: Any) -> Change:
        """Return what has changed, given the values as they are now."""
        return _compare(self._content, values)

    def put_back(self, values: Any) -> Any:
        """Return the values with everything that is remembered as it was.

        Containers, dataclasses and small tensors are changed in place, so that whoever
        has one by another name still has it.

        Args:
            values: As they are now, with what is not remembered.
        """
        return _put_back(self._content, values)

    def unknown(self) -> Iterator[tuple[str, type[Any]]]:
        """Yield paths, such as `a.0.b`, and kinds of values that are not remembered."""
        return _unknown_in(self._content, ())


class _Node:
    """A value that may change in place, or that is not known; with its content."""

    def compare(self, value: Any) -> Change:
        raise NotImplementedError

    def put_back(self, value: Any) -> Any:
        raise NotImplementedError

    def parts(self) -> Iterable[tuple[Any, Any]]:
        """Return what is remembered inside of it, by keys."""
        return ()


class _Unknown(_Node):
    """A value of which nothing tells how it was."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)

    def compare(self, value: Any) -> Change:
        del value  # Whatever it is.
        return Change.MORE

    def put_back(self, value: Any) -> Any:
        return value


class _Array(_Node):
    """A small NumPy array."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._copy = array.copy()

    def compare(self, value: Any) -> Change:
        is_same = value is self._array and _has(value, self._copy)
        return Change.NOTHING if is_same else Change.REMEMBERED

    def put_back(self, value: Any) -> Any:
        del value  # All of it is remembered.
        if self._array.shape != self._copy.shape:
            self._array.resize(self._copy.shape, refcheck=False)
        self._array[...] = self._copy
        return self._array


class _Tensor(_Node):
    """A tensor; `state_dict` hands on another object of the same storage each time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place = _place_of(tensor)
        is_small = not _is_sharded(tensor) and tensor.numel() <= MOST_COPIED
        self._copy = tensor.detach().clone() if is_small else None
        self._first = None if is_small else _first_of(tensor)

    def compare(self, value: Any) -> Change:
        is_same = is_counted(value) and _place_of(value) == self._place
        if self._copy is not None:
            is_same = is_same and _has(value, self._copy)
            return Change.NOTHING if is_same else Change.REMEMBERED
        is_same = is_same and _first_of(value) == self._first
        return Change.NOTHING if is_same else Change.MORE

    def put_back(self, value: Any) -> Any:
        if self._copy is None:
            return value
        if not _has(self._tensor, self._copy):
            with torch.no_grad():
                if self._tensor.shape == self._copy.shape:
                    self._tensor.copy_(self._copy)
                else:  # It was resized in place.
                    self._tensor.data = self._copy.clone()
        self._place = _place_of(self._tensor)
        return self._tensor


class _Dictionary(_Node):
    """A dictionary, in its order."""

    def __init__(self, own: Any, depth: int) -> None:
        self._own = own
        self._items = {
            key: each if type(each) in _PLAIN else _remember(each, depth)
            for key, each in own.items()
        }

    def compare(self, value: Any) -> Change:
        now = value if type(value) is type(self._own) else {}
        changes = [
            _compare(each, now.get(key, _MISSING)) for key, each in self._items.items()
        ]
        if list(now) != list(self._items):
            changes.append(Change.REMEMBERED)
        return max(changes, default=Change.NOTHING)

    def put_back(self, value: Any) -> Any:
        now = value if type(value) is type(self._own) else {}
        before = {
            key: _put_back(each, now.get(key, _MISSING))
            for key, each in self._items.items()
        }
        before = {key: each for key, each in before.items() if each is not _MISSING}
        if list(self._own) != list(before):
            self._own.clear()
        for key, each in before.items():  # `Counter.update` would add.
            self._own[key] = each
        return self._own

    def parts(self) -> Iterable[tuple[Any, Any]]:
        return self._items.items()


class _Row(_Node):
    """A list, a tuple or a deque; or a set, whose elements do not change."""

    def __init__(self, own: Any, depth: int) -> None:
        self._own = own
        self._is_plain = _PLAIN.issuperset(map(type, own))
        is_whole = self._is_plain or isinstance(own, (set, frozenset))
        self._copy = [*own] if is_whole else [_remember(each, depth) for each in own]

    def compare(self, value: Any) -> Change:
        is_alike = type(value) is type(self._own) and len(value) == len(self._copy)
        if isinstance(self._own, (set, frozenset)):
            is_same = is_alike and value == set(self._copy)
            return Change.NOTHING if is_same else Change.REMEMBERED
        now = [*value] if type(value) is type(self._own) else []
        if self._is_plain and is_alike and now == self._copy:  # It may be long.
            kinds = map(type, now), map(type, self._copy)
            if all(map(is_, *kinds)):
                return Change.NOTHING
        changes = [Change.NOTHING if is_alike else Change.REMEMBERED]
        now += [_MISSING] * (len(self._copy) - len(now))
        return max([*changes, *map(_compare, self._copy, now)])

    def put_back(self, value: Any) -> Any:
        own = self._own
        now = [*value] if type(value) is type(own) else []
        now += [_MISSING] * (len(self._copy) - len(now))
        before = [*map(_put_back, self._copy, now)]
        before = [each for each in before if each is not _MISSING]
        if isinstance(own, (tuple, frozenset)):
            if len(before) == len(own) and all(map(is_, before, own)):
                return own
            return own._make(before) if hasattr(own, "_make") else type(own)(before)
        own.clear()
        own.update(before) if isinstance(own, set) else own.extend(before)
        return own

    def parts(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._copy)


class _Fields(_Node):
    """A dataclass's object."""

    def __init__(self, own: Any, depth: int) -> None:
        self._own = own
        self._copy = {key: _remember(v, depth) for key, v in _fields_of(own).items()}

    def compare(self, value: Any) -> Change:
        now = _fields_of(value) if type(value) is type(self._own) else {}
        is_same = value is self._own and now.keys() == self._copy.keys()
        changes = [Change.NOTHING if is_same else Change.REMEMBERED]
        changes += [
            _compare(v, now.get(key, _MISSING)) for key, v in self._copy.items()
        ]
        return max(changes)

    def put_back(self, value: Any) -> Any:
        now = _fields_of(value) if type(value) is type(self._own) else {}
        for key in _fields_of(self._own).keys() - self._copy.keys():
            object.__delattr__(self._own, key)
        for key, each in self._copy.items():
            before = _put_back(each, now.get(key, _MISSING))
            if before is not _MISSING:
                object.__setattr__(self._own, key, before)  # It may be frozen.
        return self._own

    def parts(self) -> Iterable[tuple[Any, Any]]:
        return self._copy.items()


def _remember(value: Any, depth: int) -> Any:
    """Return a value that never changes in place as it is, else a node."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    depth += 1
    if depth <= _DEEPEST:
        if kind in DICTIONARIES and len(value) <= _MOST_VALUES:
            return _Dictionary(value, depth)
        is_row = kind in _ROWS or (isinstance(value, tuple) and hasattr(kind, "_make"))
        if is_row and _can_be_copied(value):
            return _Row(value, depth)
        if dataclasses.is_dataclass(kind):
            return _Fields(value, depth)
    if is_counted(value):
        return _Tensor(value)
    if kind is np.ndarray and value.size <= MOST_COPIED and not value.dtype.hasobject:
        return _Array(value)
    return value if _is_fixed(value) else _Unknown(value)


def _can_be_copied(row: Any) -> bool:
    """Return whether a row is short, or plain; and a set such that nothing changes."""
    if isinstance(row, (set, frozenset)):
        return all(map(_is_fixed, row))
    return len(row) <= _MOST_VALUES or _PLAIN.issuperset(map(type, row))


def _is_fixed(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    is_record = isinstance(value, np.void)
    return type(value) in _PLAIN or (isinstance(value, _FIXED) and not is_record)


def _compare(before: Any, now: Any) -> Change:
    if isinstance(before, _Node):
        return before.compare(now)
    if type(now) is type(before) and (
        now is before or now == before or (now != now and before != before)
    ):
        return Change.NOTHING
    return Change.REMEMBERED


def _put_back(before: Any, now: Any) -> Any:
    return before.put_back(now) if isinstance(before, _Node) else before


def _unknown_in(content: Any, path: tuple[str, ...]) -> Iterator[tuple[str, type[Any]]]:
    if isinstance(content, _Unknown):
        yield ".".join(path), content.kind
    elif isinstance(content, _Node):
        for key, part in content.parts():
            yield from _unknown_in(part, (*path, str(key)))


def _fields_of(own: Any) -> dict[str, Any]:
    """Return a dataclass's fields, and other attributes of that object."""
    names = [each.name for each in dataclasses.fields(own)]
    fields = {name: getattr(own, name) for name in names if hasattr(own, name)}
    return fields | getattr(own, "__dict__", {})


def _has(value: Any, copy: Any) -> bool:
    """Return whether a tensor or an array has the values of a copy, bit for bit."""
    if value.shape != copy.shape or value.dtype != copy.dtype:
        return False
    if isinstance(copy, np.ndarray):
        return bool(value.tobytes() == copy.tobytes())
    return torch.equal(value, copy)


def is_counted(value: Any) -> bool:
    """Return whether it is a tensor of which torch counts the changes in place."""
    is_known = type(value) in (torch.Tensor, torch.nn.Parameter) or _is_sharded(value)
    return (
        is_known
        and value.layout == torch.strided
        and not (value.is_meta or value.is_inference())
    )


def _is_sharded(value: Any) -> bool:
    return type(value).__name__ in SHARDED_KINDS


def _first_of(tensor: torch.Tensor) -> bytes | None:
    """Return the first elements; None on a GPU, which it would wait for."""
    local = local_shard(tensor.detach())
    return bytes(first_of(local).numpy()) if local.device.type == "cpu" else None


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that changes when the tensor, or a value in it, does."""
    local = local_shard(tensor.detach())
    return tensor._version, local.data_ptr(), local.shape, local.dtype
