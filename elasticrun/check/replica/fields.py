"""What a checked program has, as fields: its states and its plain variables."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import math
import os
import pickle
import random
import sys
import traceback
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elasticrun.checkpoint.states.generators import Generators, capture
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import Stateful, StatefulState, local_shard
from elasticrun.checkpoint.states.values import load_values
from elasticrun.job.exact import ExactSum

Field = Any  # A JSON value; an object with "hash" stands for what is too big.

VARIABLE_PREFIX = "variable:"  # Of a field that stands for a plain variable.

_MOST_ITEMS = 16  # Of a list that is written as it is.
_MOST_ELEMENTS = 1000  # Of a list that is looked into.
_MOST_TEXT = 200
_MOST_SHOWN = 16  # Values of a tensor.
_MOST_KNOWN = 10_000
_MOST_HELD = 64  # Items of a container that is looked into.
_MOST_HASHED = 1 << 22  # Of a tensor that is hashed.
_MOST_DEPTH = 3  # Of objects in objects.
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_KNOWN: dict[tuple[str, str], dict[str, Any]] = {}  # By kind and hash.


def fields_of_state(state: BaseState) -> dict[str, Field]:
    """Return every field of a state under the state's name."""
    if isinstance(state, Generators):
        return {}
    return dict(flatten(state.name, _values(state)))


def _values(state: BaseState) -> Any:
    if isinstance(state, StatefulState):
        return state.target.state_dict()
    buffer = io.BytesIO()
    state.save(buffer)
    data = buffer.getvalue()
    try:
        return _with_sums(load_values(io.BytesIO(data)), state)
    except Exception:  # Not ours: any bytes that a State of the user's writes.
        pass
    try:
        return json.loads(data)
    except ValueError:
        return data


def _with_sums(values: Any, state: BaseState) -> Any:
    """Return an accumulator's sums as numbers; it writes all their digits, as text."""
    totals = getattr(state, "totals", None)
    if not isinstance(totals, dict) or not isinstance(values, dict):
        return values
    sums = {key: v.value for key, v in totals.items() if isinstance(v, ExactSum)}
    return {**values, "totals": sums} if sums else values


def fields_of_generators(device: torch.device) -> dict[str, Field]:
    """Return what the process's random generators are at, as one field each."""
    values = capture(device)
    return {
        f"random.{name}": {"hash": _hash(repr(_plain(value)).encode())}
        for name, value in values.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def flatten(name: str, value: Any) -> Iterator[tuple[str, Field]]:
    """Yield nested values as fields: `optimizer.param_groups[0].lr`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple) and not are_plain(value, _MOST_ITEMS):
        yield f"len({name})", len(value)
        for number, inner in enumerate(value[:_MOST_ELEMENTS]):
            yield from flatten(f"{name}[{number}]", inner)
    else:
        yield name, field_of(value)


def are_plain(values: Collection[Any], most: int) -> bool:
    """Return whether values are numbers, text and the like, and not too many."""
    return len(values) <= most and all(
        isinstance(each, bool | int | float | str | None) for each in values
    )


def field_of(value: Any) -> Field:
    """Return one value as a field."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else _hashed(value.encode(), "text")
    if isinstance(value, bytes):
        return _hashed(value, f"{len(value)} bytes")
    if isinstance(value, torch.Tensor):
        return field_of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _hashed(value.tobytes(), f"array of {value.shape}")
    if isinstance(value, list | tuple):
        return [field_of(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))[:_MOST_ELEMENTS]
    return {"object": type(value).__qualname__}


def _hashed(data: bytes, text: str) -> Field:
    return {"hash": _hash(data), "text": text}


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def field_of_tensor(tensor: torch.Tensor) -> Field:
    """Return a tensor's hash, its norm, and some of its values.

    What moves a tensor further than rounding moves its norm or one of these, so that
    whole tensors need not be kept.
    """
    own = local_shard(tensor).detach().cpu().contiguous()
    if own.numel() == 1 and not own.is_floating_point() and not own.is_complex():
        return own.item()
    kind = f"{str(own.dtype).removeprefix('torch.')}{list(own.shape)}"
    data = own.reshape(-1).view(torch.uint8).numpy() if own.numel() else b""
    field: dict[str, Any] = {"tensor": kind, "hash": _hash(data)}
    known = _KNOWN.get((kind, field["hash"]))
    if known is not None:  # Most tensors are as they were a moment ago.
        return known
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[kind, field["hash"]] = field
    if own.is_floating_point() and own.numel():
        values = own.reshape(-1).double()
        field["norm"] = _finite(float(values.norm()))
        some = values[:: max(1, len(values) // _MOST_SHOWN)][:_MOST_SHOWN]
        field["some"] = [_finite(each) for each in some.tolist()]
    return field


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e300


def is_of_state(name: str, state: str) -> bool:
    """Return whether a field, or the length of one, is part of a state."""
    bare = name.removeprefix("len(").removesuffix(")")
    return bare == state or bare.startswith((f"{state}.", f"{state}["))


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
            is_small = value.numel() <= _MOST_HASHED
            return {name: field_of_tensor(value)} if is_small else {}
        if isinstance(value, np.ndarray):
            return {name: field_of(value)} if value.size <= _MOST_HASHED else {}
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
        if are_plain(items.values(), _MOST_HELD):
            found = dict(flatten(name, value))
        elif len(items) <= _MOST_HELD:
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
