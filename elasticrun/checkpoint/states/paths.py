"""Nested values by paths like `state.0.step`: changed leaf by leaf, or listed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from elasticrun.errors import CheckpointError


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
        if type(values) is dict:
            return items
        changed = OrderedDict(items)
        vars(changed).update(vars(values))
        return changed
    if type(values) in (list, tuple):
        return type(values)(
            map_paths(value, change, f"{prefix}{number}")
            for number, value in enumerate(values)
        )
    return change(path, values)


def leaves_by_path(values: Any) -> dict[str, Any]:
    """Return the leaves of nested values by their paths.

    Raises:
        CheckpointError: Two have the same path.
    """
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
