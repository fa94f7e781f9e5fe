"""Tells whether what DataLoader workers have a copy of has changed since."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
# What they hold for themselves is no change of the data.
_LEFT_OUT = (type, ModuleType, logging.Logger, logging.Handler)
_MOST = 10_000  # Values that are looked at; a long list of paths has no end.
_ROWS = (list, tuple, dict, deque)
_MANY = 100  # Parts of one of them, which come last.

# From where a value is, below what was looked at, to what it is.
Seen = dict[str, Any]


def seen(**roots: Any) -> Seen:
    """Return the plain values in objects, and which tensors and arrays these hold.

    It looks into attributes, lists, tuples, dictionaries, partial functions, bound
    methods, and variables of closures. Tensors in shared memory are left out: workers
    see what changes in those. What changes in a NumPy array's memory is not seen.
    """
    found: Seen = {}
    known: set[int] = set()
    waiting, elements = deque(roots.items()), deque[tuple[str, Any]]()
    while (waiting or elements) and len(found) + len(known) < _MOST:
        # Attributes first: a long list would leave no room for them.
        place, value = waiting.popleft() if waiting else elements.popleft()
        if isinstance(value, _PLAIN):
            found[place] = type(value), value
        elif isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_inference():
                found[place] = weakref.ref(value)
            elif not value.is_shared():  # type: ignore[no-untyped-call]
                found[place] = weakref.ref(value)
                found[f"{place} (its values)"] = value._version
        elif isinstance(value, np.ndarray):
            found[place] = weakref.ref(value)
        elif not isinstance(value, _LEFT_OUT) and id(value) not in known:
            known.add(id(value))
            is_long = isinstance(value, _ROWS) and len(value) > _MANY
            (elements if is_long else waiting).extend(_parts(place, value))
    return found


def changed(before: Seen, now: Seen) -> str | None:
    """Return where a value differs, None if none does."""
    places = now | before  # Attributes come first.
    return next((p for p in places if _differ(before.get(p), now.get(p))), None)


def _differ(before: Any, now: Any) -> bool:
    """Return whether two values of `Seen` differ; there is one reference to an object.

    References are not asked whether they are equal: tensors would compare elements.
    """
    if isinstance(before, weakref.ref) or isinstance(now, weakref.ref):
        return before is not now
    return bool(before != now)


def _parts(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (set, frozenset, *_ROWS)):
        yield from _elements(place, value)
    elif isinstance(value, FunctionType):
        yield from _variables(place, value)
    elif isinstance(value, MethodType):
        yield place, value.__self__
    elif isinstance(value, partial):
        yield from _parts(place, [value.func, *value.args, value.keywords])
    else:
        # What elasticrun's own data sets note for themselves is no change.
        is_own = type(value).__module__.startswith("elasticrun.")
        for name, each in list(getattr(value, "__dict__", {}).items()):
            if not (is_own and name.startswith("_")):
                yield f"{place}.{name}", each


def _elements(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (set, frozenset)):
        yield place, "".join(sorted(map(repr, value)))
    elif isinstance(value, dict):
        for key, each in itertools.islice(value.items(), _MOST):
            yield f"{place}[{key!r}]", each
    else:
        for number, each in enumerate(itertools.islice(value, _MOST)):
            yield f"{place}[{number}]", each


def _variables(place: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # It is empty so far.
            yield f"{place}.{name}", cell.cell_contents
