"""Nested values: mapped leaf by leaf, and checked for what cannot load safely.

A state may hold a million numbers and texts, and training waits while they are looked
at. So lists of plain values are recognized by their types, in C.

NumPy's scalars are saved as bytes that tell their type: an unpickler that executes
nothing does not know them, and a float32 sum that came back as a Python number would
go on in float64.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from elasticrun.errors import CheckpointError

_PLAIN = frozenset({bool, int, float, str, type(None)})
_LARGEST_INT = 1 << 2000  # Unpicklers that execute nothing refuse larger ones.
_MARK = b"elasticrun.numpy:"


def map_leaves(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return `values` with its leaves changed; the same object if none was.

    Args:
        change: Is not asked about rows of plain numbers and text, which it must return
            as they are.
    """
    if type(values) in (dict, OrderedDict):
        if _PLAIN.issuperset(map(type, values.values())):
            return values
        items = {key: map_leaves(value, change) for key, value in values.items()}
        if all(items[key] is values[key] for key in items):
            return values
        return _of_kind(values, items)
    if type(values) in (list, tuple):
        if _PLAIN.issuperset(map(type, values)):
            return values
        changed = [map_leaves(value, change) for value in values]
        if all(new is old for new, old in zip(changed, values, strict=True)):
            return values
        return type(values)(changed)
    return change(values)


def _of_kind(values: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return items as a dictionary like `values`, with its attributes: a module's."""
    if type(values) is dict:
        return items
    ordered = OrderedDict(items)
    vars(ordered).update(vars(values))
    return ordered


def find_maybe_unsafe(values: Any) -> Iterator[Any]:
    """Yield the parts of nested values that a safe unpickler might refuse.

    If it takes all of these, it takes `values`. A doubtful key is yielded as the key of
    a dictionary of its own. A tensor of torch's two plain classes is safe, but for its
    attributes, which are saved with it; one of another class is yielded whole, since
    the class decides how it is saved.
    """
    kind = type(values)
    if kind in (dict, OrderedDict):
        yield from ({key: None} for key in values if not is_plain((key,)))
        yield from _maybe_unsafe_among(values.values())
        if kind is OrderedDict and list(find_maybe_unsafe(vars(values))):
            # A module's has attributes, which are saved with it as they are.
            yield _of_kind(values, {})
    elif kind in (list, tuple):
        yield from _maybe_unsafe_among(values)
    elif kind is set:
        if not is_plain(values):
            yield values
    elif isinstance(values, torch.Tensor):
        if kind in (torch.Tensor, torch.nn.Parameter):
            yield from find_maybe_unsafe(vars(values))
        else:
            yield values
    elif not is_plain((values,)):
        yield values


def _maybe_unsafe_among(row: Collection[Any]) -> Iterator[Any]:
    if not is_plain(row):
        for value in row:
            yield from find_maybe_unsafe(value)


def is_plain(row: Collection[Any]) -> bool:
    """Return whether all of a row are numbers and text of Python's own types."""
    kinds = set(map(type, row))
    if not kinds <= _PLAIN:
        return False
    numbers = row if kinds == {int} else [each for each in row if type(each) is int]
    return int not in kinds or -_LARGEST_INT < min(numbers) <= max(numbers) < (
        _LARGEST_INT
    )


def map_paths(values: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return nested values with their leaves changed; these have paths like `a.0.b`.

    What a state dictionary carries as attributes, as a module's `_metadata`, is kept.
    """
    prefix = f"{path}." if path else ""
    if type(values) in (dict, OrderedDict):
        items = {
            key: map_paths(value, change, f"{prefix}{key}")
            for key, value in values.items()
        }
        return _of_kind(values, items)
    if type(values) in (list, tuple):
        return type(values)(
            map_paths(value, change, f"{prefix}{number}")
            for number, value in enumerate(values)
        )
    return change(path, values)


def leaves_by_path(values: Any) -> dict[str, Any]:
    """Return the leaves of nested values by their paths."""
    leaves: dict[str, Any] = {}

    def take(path: str, leaf: Any) -> None:
        if path in leaves:
            raise CheckpointError(
                f"two values of the state have the path {path!r}, so they could not be "
                "told apart. Rename one of them."
            )
        leaves[path] = leaf

    map_paths(values, take)
    return leaves


def encode_scalar(leaf: Any) -> Any:
    """Return a scalar as bytes that tell its type; any other leaf as it is.

    A record of several fields is left as it is, and so refused when it is saved.
    """
    if isinstance(leaf, np.generic) and not isinstance(leaf, np.void):
        return _MARK + leaf.dtype.str.encode() + b":" + leaf.tobytes()
    return leaf


def decode_scalar(leaf: Any) -> Any:
    """Return what `encode_scalar` was given."""
    if type(leaf) is not bytes or not leaf.startswith(_MARK):
        return leaf
    kind, _, data = leaf.removeprefix(_MARK).partition(b":")
    dtype = np.dtype(kind.decode())
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()


def plain_number(leaf: Any) -> Any:
    """Return a scalar as a number or a text of Python's; any other leaf as it is."""
    return leaf.item() if isinstance(leaf, np.generic) else leaf
