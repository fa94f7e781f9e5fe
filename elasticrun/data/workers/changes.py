"""Tells whether what DataLoader workers have a copy of has changed since."""

from __future__ import annotations

import contextlib
import dis
import itertools
import logging
import sys
import sysconfig
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from elasticrun.errors import is_of_program

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
# What they hold for themselves is no change of the data.
_LEFT_OUT = (ModuleType, logging.Logger, logging.Handler)
_MOST = 10_000  # Values that are looked at; a long list of paths has no end.
_MOST_ELEMENTS = 2_000_000  # Of arrays; of larger ones some, evenly spread.
_ROWS = (list, tuple, dict, deque)
_MANY = 100  # Parts of one of them, which come last.
_READ_OF_MODULE = ("LOAD_GLOBAL", "LOAD_NAME")
_LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))

# From where a value is, below what was looked at, to what it is.
Seen = dict[str, Any]


def seen(**roots: Any) -> Seen:
    """Return the plain values in objects, and which tensors and arrays these hold.

    It looks into attributes, containers, partial functions, bound methods, and what the
    program's functions and methods read of their closures, classes and modules. Shared
    memory is left out: workers see what changes there.
    """
    found: Seen = {}
    known: set[int] = set()
    num_left = _MOST_ELEMENTS
    waiting, later = deque(roots.items()), deque[tuple[str, Any]]()
    while (waiting or later) and len(found) + len(known) < _MOST:
        # Attributes first: a long list would leave no room for them.
        path, value = waiting.popleft() if waiting else later.popleft()
        if isinstance(value, _PLAIN):
            found[path] = type(value), value
        elif isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_inference():
                found[path] = weakref.ref(value)
            elif not value.is_shared():  # type: ignore[no-untyped-call]
                found[path] = weakref.ref(value)
                found[f"{path} (its values)"] = value._version
        elif isinstance(value, np.ndarray):
            found[path] = weakref.ref(value)
            picked = _picked(value, num_left // 2)  # The rest is for others.
            num_left -= picked.size
            found[f"{path} (its values)"] = zlib.crc32(picked.tobytes())
        elif not isinstance(value, _LEFT_OUT) and id(value) not in known:
            known.add(id(value))
            parts = list(_parts(path, value))
            has_rows = isinstance(value, _ROWS)
            is_long = has_rows and len(value) > _MANY
            if is_long:
                found[f"{path} (its values)"] = _hash(value)
            elif not has_rows and all(isinstance(each, type) for _, each in parts):
                found[path] = id(value)  # What is inside cannot be known.
            (later if is_long else waiting).extend(parts)
    return found


def changed(before: Seen, now: Seen) -> str | None:
    """Return where a value differs, None if none does."""
    paths = now | before  # Attributes come first.
    return next((p for p in paths if _differ(before.get(p), now.get(p))), None)


def _differ(before: Any, now: Any) -> bool:
    """Return whether two values of `Seen` differ; there is one reference to an object.

    References are not asked whether they are equal: tensors would compare elements.
    """
    if isinstance(before, weakref.ref) or isinstance(now, weakref.ref):
        return before is not now
    return bool(before != now)


def _picked(array: np.ndarray, most: int) -> np.ndarray:
    """Return elements of an array, none of what is not its own memory or a tensor's."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    is_own = isinstance(base, np.ndarray) or (
        isinstance(base, torch.Tensor) and not base.is_shared()  # type: ignore[no-untyped-call]
    )
    return array.flat[:: -(-array.size // most) or 1] if is_own else array.flat[:0]


def _hash(rows: Any) -> int:
    values = rows.values() if isinstance(rows, dict) else rows
    try:
        return hash(tuple(values))
    except TypeError:  # Of what can be changed in place.
        return hash(tuple(map(id, values)))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (set, frozenset, *_ROWS)):
        yield from _elements(path, value)
    elif isinstance(value, type):
        if _is_of_program(value.__module__):
            for name, each in vars(value).items():
                if isinstance(each, FunctionType) or not name.startswith("__"):
                    yield f"{path}.{name}", each
    elif isinstance(value, FunctionType):
        yield from _variables(path, value)
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, partial):
        yield from _parts(path, [value.func, *value.args, value.keywords])
    else:
        yield from _attributes(path, value)


def _elements(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (set, frozenset)):
        yield path, "".join(sorted(map(repr, value)))
    elif isinstance(value, dict):
        for key, each in itertools.islice(value.items(), _MOST):
            yield f"{path}[{key!r}]", each
    else:
        for number, each in enumerate(itertools.islice(value, _MOST)):
            yield f"{path}[{number}]", each


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    # What elasticrun's own data sets note for themselves is no change.
    is_own = type(value).__module__.startswith("elasticrun.")
    for name, each in list(getattr(value, "__dict__", {}).items()):
        if not (is_own and name.startswith("_")):
            yield f"{path}.{name}", each
    for kind in type(value).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if hasattr(value, name) and not name.startswith("__"):
                yield f"{path}.{name}", getattr(value, name)
        yield f"{kind.__module__}.{kind.__qualname__}", kind
    if type(value).__name__ == "BlockManager":  # Of a pandas.DataFrame.
        yield f"{path}.arrays", value.arrays


def _variables(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # It is empty so far.
            yield f"{path}.{name}", cell.cell_contents
    if _is_of_program(function.__module__):
        for name in _names(function.__code__) & function.__globals__.keys():
            yield f"{function.__module__}.{name}", function.__globals__[name]


@cache
def _names(code: CodeType) -> set[str]:
    """Return the variables of its module that a function reads, attributes left out."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    read = {e.argval for e in dis.get_instructions(code) if e.opname in _READ_OF_MODULE}
    return read.union(*inner)


def _is_of_program(module: str) -> bool:
    file = str(getattr(sys.modules.get(module), "__file__", None) or "<built-in>")
    return is_of_program(file) and not file.startswith(_LIBRARIES)
