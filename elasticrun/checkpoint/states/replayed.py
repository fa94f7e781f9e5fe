"""Remembers the values of a state before code is replayed, and restores them."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from operator import is_
from typing import Any

import numpy as np
import torch

from elasticrun.checkpoint.states.module_memory import first_of
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.checkpoint.states.values import SHARDED_KINDS

_MOST_COPIED = 1 << 10  # Elements of a tensor or an array; most that count are small.
_MOST_VALUES = 1 << 14  # In one container, if not all of them are plain.
_DEEPEST = 32  # Deeper values may contain themselves.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
PLAIN_TYPES = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MISSING = object()


class Change(IntEnum):
    """What replayed code has changed: nothing, what is remembered, or more."""

    NOTHING = 0
    REMEMBERED = 1
    MORE = 2  # It has to be loaded again.


class Remembered:
    """Nested values as they were at one moment.

    Numbers, text and small tensors are copied. Of large tensors only the storage,
    torch's count of changes in place and, on CPUs, the first elements are remembered,
    which see every change but one of other elements through `tensor.data`. Anything
    else counts as changed.
    """

    def __init__(self, values: Any) -> None:
        self._node = _remember(values)

    def compare(self, values: Any) -> Change:
        """Return what has changed, given the values as they are now."""
        change: Change = self._node.compare(values)
        return change

    def put_back(self, values: Any) -> Any:
        """Return the values with everything that is remembered as it was.

        Containers and small tensors are changed in place, so that whoever has one by
        another name still has it.

        Args:
            values: As they are now, with what is not remembered.
        """
        return self._node.put_back(values)


class _Leaf:
    """A value that is not changed in place, such as a number, or nothing known."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def compare(self, value: Any) -> Change:
        if not isinstance(self._value, _PLAIN):
            return Change.MORE
        is_same = type(value) is type(self._value) and (
            value == self._value or (value != value and self._value != self._value)
        )
        return Change.NOTHING if is_same else Change.REMEMBERED

    def put_back(self, value: Any) -> Any:
        return self._value if isinstance(self._value, _PLAIN) else value


class _Array:
    """A small NumPy array."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._copy = array.copy()

    def compare(self, value: Any) -> Change:
        is_same = value is self._array and np.array_equal(value, self._copy)
        return Change.NOTHING if is_same else Change.REMEMBERED

    def put_back(self, value: Any) -> Any:
        del value  # All of it is remembered.
        self._array[...] = self._copy
        return self._array


class _Tensor:
    """A tensor; `state_dict` hands on another object of the same storage each time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place = _place_of(tensor)
        is_small = not _is_sharded(tensor) and tensor.numel() <= _MOST_COPIED
        self._copy = tensor.detach().clone() if is_small else None
        self._first = None if is_small else _first_of(tensor)

    def compare(self, value: Any) -> Change:
        is_same = _is_counted(value) and _place_of(value) == self._place
        if self._copy is not None:
            is_same = is_same and torch.equal(value, self._copy)
            return Change.NOTHING if is_same else Change.REMEMBERED
        is_same = is_same and _first_of(value) == self._first
        return Change.NOTHING if is_same else Change.MORE

    def put_back(self, value: Any) -> Any:
        if self._copy is None:
            return value
        if not torch.equal(self._tensor, self._copy):
            with torch.no_grad():
                self._tensor.copy_(self._copy)
            self._place = _place_of(self._tensor)
        return self._tensor


class _Container:
    """A dictionary, a list or a tuple."""

    def __init__(self, container: Any, depth: int) -> None:
        self._container = container
        self._nodes = {
            key: _remember(value, depth + 1) for key, value in _items_of(container)
        }

    def compare(self, value: Any) -> Change:
        now = self._items_now(value)
        has_these = now.keys() == self._nodes.keys()
        changes = [Change.NOTHING if has_these else Change.REMEMBERED]
        changes += [
            node.compare(now.get(key, _MISSING)) for key, node in self._nodes.items()
        ]
        return max(changes)

    def put_back(self, value: Any) -> Any:
        now = self._items_now(value)
        before = {
            key: node.put_back(now.get(key, _MISSING))
            for key, node in self._nodes.items()
        }
        before = {key: each for key, each in before.items() if each is not _MISSING}
        container = self._container
        if isinstance(container, tuple):
            return type(container)(before.values())
        if isinstance(container, list):
            container[:] = before.values()
        else:
            for key in container.keys() - before.keys():
                del container[key]
            container.update(before)
        return container

    def _items_now(self, value: Any) -> dict[Any, Any]:
        is_alike = type(value) is type(self._container)
        return dict(_items_of(value)) if is_alike else {}


class _Row:
    """A list or a tuple of numbers and text only, which may be long."""

    def __init__(self, row: Any) -> None:
        self._row = row
        self._copy = row.copy() if isinstance(row, list) else row

    def compare(self, value: Any) -> Change:
        is_same = (
            type(value) is type(self._row)
            and value == self._copy
            and all(map(is_, map(type, value), map(type, self._copy)))
        )
        return Change.NOTHING if is_same else Change.REMEMBERED

    def put_back(self, value: Any) -> Any:
        del value  # All of it is remembered.
        if isinstance(self._row, list):
            self._row[:] = self._copy
        return self._row


def _remember(values: Any, depth: int = 0) -> Any:
    kind = type(values)
    if kind in (list, tuple) and PLAIN_TYPES.issuperset(map(type, values)):
        return _Row(values)
    is_container = kind in (dict, OrderedDict, list, tuple)
    if is_container and len(values) <= _MOST_VALUES and depth < _DEEPEST:
        return _Container(values, depth)
    if _is_counted(values):
        return _Tensor(values)
    if isinstance(values, np.ndarray) and values.size <= _MOST_COPIED:
        return _Array(values)
    return _Leaf(values)


def _items_of(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _is_counted(value: Any) -> bool:
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
