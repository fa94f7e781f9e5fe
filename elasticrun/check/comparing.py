"""Comparing a run with the baseline: the first snapshots that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, NamedTuple

from elasticrun.check.checked_run import CheckedRun, Snapshot, SnapshotKey
from elasticrun.check.replica.fields import is_of_state
from elasticrun.check.replica.file_watch import FILE_PREFIX

MISSING = {"missing": True}
# Far above what rounding does in double precision, far below what a mistake does; the
# absolute part is for what would be 0 without rounding.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-10


class Mismatch(NamedTuple):
    """Something that is not as it is without a restart.

    Attributes:
        name: The field; a file with the prefix `file:`; or "samples", "loops".
        key: The snapshot in which it was first seen.
    """

    name: str
    expected: Any
    found: Any
    key: SnapshotKey | None = None


@dataclass
class IgnoredDifferences:
    """What is not compared, and why.

    Attributes:
        ignored: Patterns that the user gave for fields and files.
        volatile_files: Files that differ from run to run; their lines are counted.
        unnamed_files: One of the files that have another name in each run, by the shape
            of their names: a third run has names that no other one has.
        unseeded: Random generators without a seed; what is drawn from them shows in
            fields, which are compared.
        noise: Plain variables that differ from run to run by themselves.
    """

    patterns: tuple[str, ...] = ()
    volatile_files: set[str] = field(default_factory=set)
    unnamed_files: dict[str, str] = field(default_factory=dict)
    unseeded: set[str] = field(default_factory=set)
    noise: set[str] = field(default_factory=set)

    def hides(self, name: str) -> bool:
        """Return whether the user does not want it to be compared."""
        plain = name.removeprefix(FILE_PREFIX)
        return any(
            fnmatch(plain, each) or fnmatch(name, each) for each in self.patterns
        )


def compare_snapshots(
    base: CheckedRun, run: CheckedRun, *, ignored: IgnoredDifferences
) -> list[Mismatch]:
    """Return what differs in the first snapshot in which anything does.

    From where there is another number of replicas on, sums were added up in another
    order, unless there are virtual replicas; else all is compared bit by bit.
    """
    wanted, there = base.compared, run.compared
    early = next(iter(wanted.values())).states if wanted else []
    for key, snapshot in wanted.items():
        if key not in there:
            return [Mismatch("loops", key.describe(), "never came", key)]
        late = set(snapshot.states) - {*there[key].states, *early}
        differences = _differences(
            _without(late, snapshot),
            there[key],
            ignored,
            is_killed=run.scenario.is_killed,
            is_rounded=base.num_virtual is None
            and run.scenario.is_resized_in(
                there[key].generation, base.scenario.sizes[0]
            ),
        )
        if differences:
            return [each._replace(key=key) for each in differences]
    extra = [key for key in there if key not in wanted]
    if extra:
        return [Mismatch("loops", "never came", extra[0].describe(), extra[0])]
    return []


def _without(states: Collection[str], snapshot: Snapshot) -> Snapshot:
    """Leave out states that a loop has made, which a replay may not have come to."""
    fields = {
        name: field
        for name, field in snapshot.fields.items()
        if not any(is_of_state(name, state) for state in states)
    }
    return snapshot._replace(fields=fields)


def _differences(
    expected: Snapshot,
    found: Snapshot,
    ignored: IgnoredDifferences,
    *,
    is_killed: bool,
    is_rounded: bool,
) -> list[Mismatch]:
    differences = []
    if expected.num_batches != found.num_batches:
        batches = Mismatch("batches", expected.num_batches, found.num_batches)
        differences.append(batches)
    differences += compare_fields(
        expected.fields, found.fields, ignored, is_rounded=is_rounded
    )
    # At the end nothing draws any more, so nothing has put the generators back.
    if not is_rounded and expected.key.kind != "exit":
        for name in expected.random.keys() - ignored.unseeded:
            one, other = expected.random[name], found.random.get(name)
            if one != other and not ignored.hides(name):
                differences.append(Mismatch(name, one, other))
    differences += compare_files(
        expected.files,
        found.files,
        ignored,
        is_killed=is_killed,
        is_rounded=is_rounded,
    )
    return differences


def compare_fields(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    ignored: IgnoredDifferences,
    *,
    is_rounded: bool = False,
) -> list[Mismatch]:
    """Return the fields that differ."""
    differences = []
    for name in dict.fromkeys([*expected, *found]):
        one, other = expected.get(name, MISSING), found.get(name, MISSING)
        if one == other or ignored.hides(name):
            continue
        is_missing = MISSING in (one, other)
        if is_rounded and (is_missing or is_near(one, other)):
            continue
        differences.append(Mismatch(name, one, other))
    return differences


def is_near(one: Any, other: Any) -> bool:
    """Return whether rounding in double precision can explain how two fields differ."""
    if one == other:
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_near, one, other))
    if is_tensor(one) and is_tensor(other):
        return one["tensor"] == other["tensor"] and _are_close_tensors(one, other)
    are_numbers = all(isinstance(each, int | float) for each in (one, other))
    return are_numbers and float in map(type, (one, other)) and _is_close(one, other)


def is_tensor(value: Any) -> bool:
    """Return whether a field is a tensor of numbers that rounding moves."""
    return isinstance(value, dict) and "some" in value


def _are_close_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    size = max(map(abs, one["some"]))
    values = zip(one["some"], other["some"], strict=True)
    is_norm_close = _is_close(one["norm"], other["norm"])
    return is_norm_close and all(_is_close(*pair, size) for pair in values)


def _is_close(one: float, other: float, size: float = 0.0) -> bool:
    """Return whether numbers are near, as measured by one of them or by a size."""
    return abs(one - other) <= _RELATIVE * max(abs(one), size) + _ABSOLUTE


def compare_files(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    ignored: IgnoredDifferences,
    *,
    is_killed: bool = False,
    is_rounded: bool = False,
) -> list[Mismatch]:
    """Return the files that differ, as far as they can be compared.

    Args:
        is_killed: Whether they may hold more than they would without a kill.
    """
    differences = []
    for path in dict.fromkeys([*expected, *found]):
        name = FILE_PREFIX + path
        one, other = expected.get(path), found.get(path)
        if one == other or ignored.hides(name):
            continue
        if not (one and other) and shape_of_name(path) in ignored.unnamed_files:
            continue
        if is_killed and other and other.get("size", 0) >= (one or {}).get("size", 0):
            continue  # Also one that was written just before the kill.
        if one and other:
            # Numbers in it may differ; that a line is there twice is another matter.
            is_counted = path in ignored.volatile_files or is_rounded
            if is_counted and one.get("lines") == other.get("lines"):
                continue
        differences.append(Mismatch(name, one, other))
    return differences


def shape_of_name(path: str) -> str:
    """Return a path without what looks like a time, a process or a random name."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", path)


def compare_samples(
    expected: Mapping[Any, Any], found: Mapping[Any, Any]
) -> list[Mismatch]:
    """Return the first global batch whose samples differ."""
    for key in dict.fromkeys([*expected, *found]):
        one, other = expected.get(key), found.get(key)
        if one != other:
            epoch, loop, batch = key
            name = f"samples of batch {batch + 1} in loop {loop} of epoch {epoch}"
            return [Mismatch(name, one, other)]
    return []


def show(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return "None"
    if value == MISSING:
        return "not there"
    if isinstance(value, dict):
        if "tensor" in value:
            norm = value.get("norm")
            text = value["tensor"]
            return text if norm is None else f"{text} of norm {norm:.9g}"
        if "size" in value:
            lines = f"{value['lines']} lines, " if "lines" in value else ""
            return f"{lines}{value['size']} bytes"
        for name in ("float", "text", "object"):
            if name in value:
                return str(value[name])
        return "another state"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.10g}"
    return repr(value)
