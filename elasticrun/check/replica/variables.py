"""The plain variables of the program: what a restart loses."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
import types
from collections.abc import Collection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from elasticrun.check.replica.fields import (
    Field,
    are_plain,
    field_of,
    field_of_tensor,
    flatten,
)
from elasticrun.checkpoint.states.stateful import Stateful

_MOST_ITEMS = 64
_MOST_ELEMENTS = 1 << 22  # Of a tensor that is hashed.


def plain_variables(root: str, *, registered: Collection[int]) -> dict[str, Field]:
    """Return the variables of the program's frames that no checkpoint keeps.

    Those of the innermost frame come first.

    Args:
        root: The folder that the program's own files are in.
        registered: The identities of objects that checkpoints keep.
    """
    found: dict[str, Field] = {}
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if not is_own_file(frame.f_code.co_filename, root):
            continue
        function = frame.f_code.co_name
        prefix = "" if function == "<module>" else f"{function}."
        for name, value in list(frame.f_locals.items()):
            if not name.startswith("__"):
                found.update(_fields(f"{prefix}{name}", value, root, registered))
    return found


def is_own_file(name: str, root: str) -> bool:
    """Return whether a file is the program's, and not an installed package's."""
    return name.startswith(root + os.sep) and "site-packages" not in name


def _fields(
    name: str, value: Any, root: str, registered: Collection[int], *, depth: int = 0
) -> dict[str, Field]:
    """Return a variable as fields; of an object of the program's, its attributes."""
    if id(value) in registered or _is_boring(value):
        return {}
    if isinstance(value, bool | int | float | str | None):
        return {name: field_of(value)}
    if isinstance(value, torch.Tensor):
        is_small = value.numel() <= _MOST_ELEMENTS
        return {name: field_of_tensor(value)} if is_small else {}
    if isinstance(value, list | tuple | dict | set):
        items = value.values() if isinstance(value, dict) else value
        if are_plain(items, _MOST_ITEMS):
            return dict(flatten(name, value))
        return {f"len({name})": len(value)}
    if _is_of_program(value, root) and depth == 0 and hasattr(value, "__dict__"):
        found = {}
        for key, inner in list(vars(value).items()):
            found.update(_fields(f"{name}.{key}", inner, root, registered, depth=1))
        return found
    if isinstance(value, Stateful) and not isinstance(value, type):
        return {name: _summary(value)}
    return {}


def _is_boring(value: Any) -> bool:
    if isinstance(value, types.ModuleType | types.FunctionType | type | Dataset):
        return True
    kind = type(value)
    return isinstance(value, DataLoader) or kind.__module__.startswith("elasticrun.")


def _is_of_program(value: Any, root: str) -> bool:
    module = sys.modules.get(type(value).__module__)
    return is_own_file(getattr(module, "__file__", None) or "", root)


def _summary(value: Stateful) -> Field:
    """Return one field for an object with a state, such as an averaged model."""
    digest = hashlib.blake2b(digest_size=12)
    try:
        for name, field in flatten("", value.state_dict()):
            digest.update(f"{name}={field}".encode())
    except Exception:  # Not every object can be asked at any time.
        return None
    return {"object": type(value).__qualname__, "hash": digest.hexdigest()}
