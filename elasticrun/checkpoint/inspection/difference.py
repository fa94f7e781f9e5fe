"""`elasticrun checkpoints diff`: which values differ, and by how much."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.inspection.columns import columns
from elasticrun.checkpoint.inspection.contents import (
    kind_of,
    leaves,
    load_file,
    names_of_state,
    records_of_state,
    to_plain,
    value_of,
)

ADDED, REMOVED, CHANGED = "added", "removed", "changed"


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
        state: The file it is in.
        how: ADDED, REMOVED or CHANGED.
        text: From what to what, or by how much.
        num_changed: Of a tensor: how many of its values differ.
        num_no_longer_finite: Of a tensor: how many were finite and are so no more.
        largest: Of a tensor: the largest absolute difference of two finite values, as
            doubles; None if no two of those differ.
        relative: Of a tensor: the norm of these differences by that of the first.
    """

    state: str
    path: str
    how: str
    text: str
    num_changed: int | None = None
    num_no_longer_finite: int | None = None
    largest: float | None = None
    relative: float | None = None


def compare(
    old: Checkpoint, new: Checkpoint, state: str | None, *, as_json: bool
) -> Generator[str, None, int]:
    """Compare two checkpoints, or one state of them.

    Yields:
        What differs, a line a value.

    Returns:
        How many values differ.

    Raises:
        InspectionError: There is no such state, or a file is damaged.
    """
    every = []
    for name in names_of_state(old, new, word=state):
        changes = list(_changes_of(old, new, name))
        every += changes
        if as_json:
            continue
        yield f"{name}{'' if changes else '  same'}"
        rows = [(f"  {each.how}", each.path, each.text) for each in changes]
        yield from columns(rows) if rows else ()
    if as_json:
        yield json.dumps({"changes": [asdict(change) for change in every]})
    return len(every)


def _changes_of(old: Checkpoint, new: Checkpoint, name: str) -> Iterator[Difference]:
    before, now = (
        _by_path(load_file(side, name)) if side.has(name) else {} for side in (old, new)
    )
    is_same = True
    for path in [*before, *(path for path in now if path not in before)]:
        if path not in now:
            change: Difference | None = Difference(
                name, path, REMOVED, kind_of(before[path])
            )
        elif path not in before:
            change = Difference(name, path, ADDED, kind_of(now[path]))
        else:
            change = _compare(name, path, before[path], now[path])
        if change is not None:
            is_same = False
            yield change
    if is_same and records_of_state(old, name) != records_of_state(new, name):
        # As where a list is a tuple now.
        yield Difference(name, "", CHANGED, "bytes differ, though no value shown does")


def _by_path(values: Any) -> dict[str, Any]:
    """Return the leaves by their paths; of those with one path each by one of its own.

    The key "a.b" has the path of "b" in "a".
    """
    found: dict[str, Any] = {}
    for path, leaf in leaves(values):
        own, number = path, 1
        while own in found:
            number += 1
            own = f"{path} ({number})"
        found[own] = leaf
    return found


def _compare(name: str, path: str, old: Any, new: Any) -> Difference | None:
    if kind_of(old) != kind_of(new):
        return Difference(name, path, CHANGED, f"{kind_of(old)} to {kind_of(new)}")
    if isinstance(old, torch.Tensor):
        try:
            return _compare_tensors(name, path, old, new)
        except RuntimeError:  # Torch cannot compute with them, as with nested ones.
            return _compare_bytes(name, path, old, new)
    if old == new or value_of(old) == value_of(new) == "nan":
        return None
    texts = value_of(old), value_of(new)
    if texts[0] == texts[1]:  # Both are longer than what is shown of them, or nothing.
        return Difference(name, path, CHANGED, f"{kind_of(old)}, not the same")
    return Difference(name, path, CHANGED, f"{texts[0]} to {texts[1]}")


def _compare_tensors(
    name: str, path: str, old: torch.Tensor, new: torch.Tensor
) -> Difference | None:
    text = kind_of(old)
    old, new = to_plain(old), to_plain(new)
    kind = torch.complex128 if old.is_complex() else torch.float64
    first, second = old.to(kind), new.to(kind)
    is_nan = first.isnan() & second.isnan()
    has_changed = (first != second) & ~is_nan
    change = second - first
    if old.dtype in (torch.int64, torch.uint64):  # Not all of which fit into a double.
        has_changed = old.view(torch.int64) != new.view(torch.int64)
    num_changed = int(has_changed.sum())
    if not num_changed:
        return None
    was_finite, is_finite = torch.isfinite(first), torch.isfinite(second)
    finite = was_finite & is_finite
    not_finite = {
        "no longer finite": int((was_finite & ~is_finite).sum()),
        "finite again": int((~was_finite & is_finite).sum()),
        "still not finite": int((has_changed & ~was_finite & ~is_finite).sum()),
    }
    parts = [text, f"{num_changed} of {old.numel()}"]
    parts += [f"{number} {how}" for how, number in not_finite.items() if number]
    largest = relative = None
    if (has_changed & finite).any():
        change = torch.where(finite, change, 0)
        norm = float(torch.linalg.vector_norm(torch.where(finite, first, 0)))
        largest = float(change.abs().max())
        relative = float(torch.linalg.vector_norm(change)) / norm if norm else None
        parts += [f"at most {largest:.3g}"]
    if relative is not None:
        parts += [f"{relative:.2%} of the norm"]
    text = ", ".join(parts)
    num_lost = not_finite["no longer finite"]
    return Difference(
        name, path, CHANGED, text, num_changed, num_lost, largest, relative
    )


def _compare_bytes(
    name: str, path: str, old: torch.Tensor, new: torch.Tensor
) -> Difference | None:
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(old, first)
    torch.save(new, second)
    if first.getvalue() == second.getvalue():
        return None
    return Difference(name, path, CHANGED, f"{kind_of(old)}, bytes differ")
