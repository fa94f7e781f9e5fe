"""The plain variables of the program: what a restart loses."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import random
import sys
import traceback
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elasticrun.check.replica.fields import (
    Field,
    are_plain,
    field_of,
    field_of_tensor,
    flatten,
)
from elasticrun.check.runs.moments import is_of_state
from elasticrun.checkpoint.states.stateful import Stateful

_MOST_ITEMS = 64
_MOST_ELEMENTS = 1 << 22  # Of a tensor that is hashed.
_MOST_DEPTH = 3  # Of objects in objects.
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def plain_variables(
    root: str, *, registered: Collection[int], only: Collection[str] = ()
) -> dict[str, Field]:
    """Return the variables of the program that no checkpoint keeps.

    Those of its innermost frame come first, those of its modules last. What has two
    names is there once.

    Args:
        root: The folder that the program's own files are in.
        registered: The identities of objects that checkpoints keep.
        only: Fields to look for; none for all.
    """
    found: dict[str, Field] = {}
    reader = _Reader(root, set(registered))
    for prefix, values in _scopes(root):
        for name, value in list(values.items()):
            full = f"{prefix}{name}"
            is_wanted = not only or any(is_of_state(each, full) for each in only)
            if is_wanted and not name.startswith("__"):
                found.update(reader.fields(full, value))
    return found


def _scopes(root: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if is_own_file(frame.f_code.co_filename, root):
            function = frame.f_code.co_name
            prefix = "" if function == "<module>" else f"{function}."
            yield prefix, frame.f_locals
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name != "__main__" and path and is_own_file(path, root):
            yield f"{name}.", vars(module)


def is_own_file(name: str, root: str) -> bool:
    """Return whether a file is the program's, and not an installed package's."""
    return name.startswith(root + os.sep) and "site-packages" not in name


class _Reader:
    """Reads variables as fields, each object once."""

    def __init__(self, root: str, seen: set[int]) -> None:
        self._root = root
        self._kept = frozenset(seen)
        self._modules: set[torch.nn.Module] = set()
        self._seen = seen

    def fields(self, name: str, value: Any, depth: int = 0) -> dict[str, Field]:
        """Return a variable as fields; of an object, its attributes."""
        if isinstance(value, bool | int | float | str | None):
            return {name: field_of(value)}
        if isinstance(value, torch.nn.Module) and self._is_kept(value):
            return self._beside(name, value)
        if id(value) in self._seen or depth > _MOST_DEPTH:
            return {}
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            is_small = value.numel() <= _MOST_ELEMENTS
            return {name: field_of_tensor(value)} if is_small else {}
        if isinstance(value, np.ndarray):
            return {name: field_of(value)} if value.size <= _MOST_ELEMENTS else {}
        if isinstance(value, list | tuple | dict | set | deque):
            return self._items(name, value, depth)
        if isinstance(value, torch.Generator):
            return {name: field_of_tensor(value.get_state())}
        if isinstance(value, _GENERATORS):
            return {name: {**field_of(pickle.dumps(value)), "text": "a generator"}}
        return self._attributes(name, value, depth)

    def _is_kept(self, module: torch.nn.Module) -> bool:
        is_own = type(module).__module__.startswith("elasticrun.")
        return is_own or id(module) in self._kept

    def _beside(self, name: str, module: torch.nn.Module) -> dict[str, Field]:
        """Return attributes of a module that is kept, which are in no state."""
        found: dict[str, Field] = {}
        for path, each in module.named_modules(memo=self._modules):
            if each is not module and not self._is_of_program(each):
                continue
            full = ".".join(filter(None, (name, path)))
            own = {k: v for k, v in vars(each).items() if k[0] != "_"}
            # What is missing after a restart is seen by their number.
            found[f"len({full}.__dict__)"] = len(own)
            for key in own.keys() - {"training"}:
                found |= self.fields(f"{full}.{key}", own[key], 1)
        return found

    def _items(self, name: str, value: Any, depth: int) -> dict[str, Field]:
        value = list(value) if isinstance(value, deque) else value
        items = value if isinstance(value, dict) else dict(enumerate(value))
        found: dict[str, Field] = {}
        if are_plain(items.values(), _MOST_ITEMS):
            found = dict(flatten(name, value))
        elif len(items) <= _MOST_ITEMS:
            for key, inner in items.items():
                found |= self.fields(f"{name}[{key!r}]", inner, depth + 1)
        return found if name in found else {f"len({name})": len(value), **found}

    def _attributes(self, name: str, value: Any, depth: int) -> dict[str, Field]:
        if isinstance(value, DataLoader):
            return self.fields(f"{name}.dataset", value.dataset, depth)
        if type(value).__module__.startswith("elasticrun."):
            return {}
        if hasattr(value, "cache_info"):  # Of functools.
            return {f"len({name})": value.cache_info().currsize}
        found: dict[str, Field] = {}
        if isinstance(value, Dataset) or self._is_of_program(value):
            for key, inner in _parts(value).items():
                found |= self.fields(f"{name}.{key}", inner, depth + 1)
        elif isinstance(value, Stateful) and not isinstance(value, type):
            found[name] = _summary(value)
        return found

    def _is_of_program(self, value: Any) -> bool:
        if isinstance(value, types.ModuleType | type):
            return False
        kind = value if isinstance(value, types.FunctionType) else type(value)
        module = sys.modules.get(kind.__module__)
        return is_own_file(getattr(module, "__file__", None) or "", self._root)


def _parts(value: Any) -> dict[str, Any]:
    """Return an object's attributes, or what a function holds as a closure."""
    if not isinstance(value, types.FunctionType):
        return dict(getattr(value, "__dict__", {}))
    try:
        return dict(inspect.getclosurevars(value).nonlocals)
    except ValueError:  # Something in it has no value yet.
        return {}


def _summary(value: Stateful) -> Field:
    """Return one field for an object with a state, such as an averaged model."""
    digest = hashlib.blake2b(digest_size=12)
    try:
        for name, field in flatten("", value.state_dict()):
            digest.update(f"{name}={field}".encode())
    except Exception:  # Not every object can be asked at any time.
        return None
    return {"object": type(value).__qualname__, "hash": digest.hexdigest()}
