"""Tells whether what DataLoader workers have a copy of has changed since."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST = 10_000  # Values that are looked at; a long list of paths has no end.

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
    waiting = list(roots.items())
    for place, value in waiting:  # Which grows meanwhile.
        if len(found) + len(known) >= _MOST:
            break
        if isinstance(value, _PLAIN):
            found[place] = type(value), value
        elif isinstance(value, torch.Tensor):
            if not value.is_shared():  # type: ignore[no-untyped-call]
                found[place] = weakref.ref(value)
                found[f"{place} (its values)"] = value._version
        elif isinstance(value, np.ndarray):
            found[place] = weakref.ref(value)
        elif not isinstance(value, (type, ModuleType)) and id(value) not in known:
            known.add(id(value))
            waiting += _parts(place, value)
    return found


def changed(before: Seen, now: Seen) -> str | None:
    """Return where a value differs, None if none does."""
    places = before | now
    return next((p for p in places if _differ(before.get(p), now.get(p))), None)


def _differ(before: Any, now: Any) -> bool:
    """Return whether two values of `Seen` differ; there is one reference to an object.

    References are not asked whether they are equal: tensors would compare elements.
    """
    if isinstance(before, weakref.ref) or isinstance(now, weakref.ref):
        return before is not now
    return bool(before != now)


def _parts(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for number, each in enumerate(value[:_MOST]):
            yield f"{place}[{number}]", each
    elif isinstance(value, dict):
        for key, each in value.items():
            yield f"{place}[{key!r}]", each
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value).nonlocals
        yield from ((f"{place}.{name}", each) for name, each in variables.items())
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
