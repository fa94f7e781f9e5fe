"""The batch sizes that loaders have had, as plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.inspection.contents import load_file
from elasticrun.checkpoint.states.expected import SIZES, check_values

_PREFIXES = ("loader.", "loader-")  # As states of loaders are called.


def plans_in(checkpoint: Checkpoint) -> dict[str, dict[int, int]]:
    """Return each loader's plan, as `batch_size=` takes it.

    A plan goes from the samples seen to the size of global batches from there on.
    """
    plans = {name: plan_in(values) for name, values in states_of_loaders(checkpoint)}
    return {name: plan for name, plan in plans.items() if plan}


def states_of_loaders(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each loader, and what is kept of it."""
    for name in checkpoint.names():
        if name.startswith(_PREFIXES):
            values = load_file(checkpoint, name)
            if isinstance(values, dict):  # Whoever has written the file.
                yield name.removeprefix("loader."), values


def plan_in(values: dict[str, Any]) -> dict[int, int]:
    """Return the plan in the state of a loader; empty of one of loaders."""
    sizes = values.get("batch_size", [])
    given = [[0, sizes]] if isinstance(sizes, int) else sizes
    sizes = [*given, *values.get("decided_batch_sizes", [])]
    check_values(sizes, SIZES, name="sizes of batches")
    return dict(sizes)
