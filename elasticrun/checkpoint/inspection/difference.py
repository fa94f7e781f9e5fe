"""`elasticrun checkpoints diff`: which values of two differ, and by how much."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
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
    to_plain,
    value_of,
)
from elasticrun.checkpoint.states.state import state_of_file

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
        largest: Of a tensor: the largest absolute difference of two finite values;
            None if no two of those differ.
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


class Comparison:
    """Compares two checkpoints, or one state of them.

    Attributes:
        num_changes: How many values were found to differ so far.
    """

    def __init__(self, old: Checkpoint, new: Checkpoint, state: str | None) -> None:
        self._old = old
        self._new = new
        self._state = state
        self.num_changes = 0

    def lines(self, *, as_json: bool) -> Iterator[str]:
        """Yield what differs, a line a value.

        Raises:
            InspectionError: There is no such state, or a file is damaged.
        """
        if as_json:
            changes = [change for name in self._names() for change in self._of(name)]
            yield json.dumps({"changes": [asdict(change) for change in changes]})
            return
        for name in self._names():
            changes = list(self._of(name))
            yield f"{name}{'' if changes else '  same'}"
            if changes:
                yield from columns(
                    (f"  {each.how}", each.path, each.text) for each in changes
                )

    def _names(self) -> list[str]:
        return names_of_state(self._old, self._new, word=self._state)

    def _of(self, name: str) -> Iterator[Difference]:
        old, new = (
            _by_path(load_file(side, name)) if side.has(name) else {}
            for side in (self._old, self._new)
        )
        num_before = self.num_changes
        for path in [*old, *(path for path in new if path not in old)]:
            if path not in new:
                change: Difference | None = Difference(
                    name, path, REMOVED, kind_of(old[path])
                )
            elif path not in old:
                change = Difference(name, path, ADDED, kind_of(new[path]))
            else:
                change = _compare(name, path, old[path], new[path])
            if change is not None:
                self.num_changes += 1
                yield change
        if self.num_changes == num_before and self._bytes_differ(name):
            self.num_changes += 1
            yield Difference(
                name, "", CHANGED, "bytes differ, though no value shown does"
            )

    def _bytes_differ(self, name: str) -> bool:
        """Return whether the files are not the same: a list may now be a tuple."""
        old, new = (
            [
                each
                for each in side.manifest.files
                if name in (each.name, state_of_file(each.name))
            ]
            for side in (self._old, self._new)
        )
        return old != new


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
    if old.dtype in (torch.int64, torch.uint64):
        change = _change_of_long(old, new)
        has_changed = change != 0
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


def _change_of_long(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return how whole numbers differ that do not all fit into a double."""
    halves = zip(_halves(old), _halves(new), strict=True)
    high, low = (after - before for before, after in halves)
    return high * 2.0**32 + low


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 32 bits of whole numbers, each exact as a double."""
    bits = tensor.view(torch.int64)
    high = bits >> 32
    if tensor.dtype == torch.uint64:
        high = high & 0xFFFFFFFF
    return high.double(), (bits & 0xFFFFFFFF).double()
