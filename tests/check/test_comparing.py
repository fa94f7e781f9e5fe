"""What two runs are compared by."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from elasticrun.check.checked_run import CheckedRun, Snapshot, SnapshotKey
from elasticrun.check.checker import note_what_differs
from elasticrun.check.comparing import (
    IgnoredDifferences,
    compare_fields,
    compare_files,
    compare_snapshots,
    is_near,
)
from elasticrun.check.replica.fields import field_of
from elasticrun.check.scenarios import Scenario


def test_ignored_fields_are_not_compared() -> None:
    one, other = {"a.b": 1, "a.c": 2}, {"a.b": 3, "a.c": 4}
    assert [
        d.name for d in compare_fields(one, other, IgnoredDifferences(("*.b",)))
    ] == ["a.c"]


def test_rounding_in_double_precision_is_no_difference() -> None:
    assert is_near(0.1, 0.1 + 1e-15)
    assert is_near([1, 0.5], [1, 0.5 + 1e-12])
    assert is_near(0.0, -1e-17)
    assert not is_near(0.1, 0.1001)
    assert not is_near(3, 4)
    assert not is_near([0.5], [0.5, 0.5])
    assert not is_near("a", "b")
    assert not is_near(1.0, {"float": "nan"})


def test_tensors_are_near_if_rounding_alone_moves_them() -> None:
    weights = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    whole = field_of(weights)
    assert is_near(whole, field_of(weights * (1 + 1e-12)))
    assert not is_near(whole, field_of(weights * (1 + 1e-4)))
    assert not is_near(whole, field_of(-weights))  # Of the same norm.
    assert not is_near(whole, field_of(weights.float() * (1 + 1e-12)))
    assert not is_near(whole, field_of(torch.cat([weights, weights])))
    one_more = weights.clone()
    one_more[500] += 0.1
    assert not is_near(whole, field_of(one_more))
    assert not is_near(whole, field_of(weights * math.nan))


def test_files_are_compared_as_far_as_they_can_be() -> None:
    one = {"log": {"lines": 2, "size": 9, "hash": "x"}, "net": {"size": 5, "hash": "y"}}
    other = {
        "log": {"lines": 3, "size": 12, "hash": "z"},
        "net": {"size": 5, "hash": "u"},
    }

    def names(**options: bool) -> list[str]:
        return [
            d.name for d in compare_files(one, other, IgnoredDifferences(), **options)
        ]

    assert names() == ["file:log", "file:net"]
    assert names(is_rounded=True) == ["file:log"]
    assert names(is_killed=True) == []
    assert compare_files(one, one, IgnoredDifferences()) == []
    (gone,) = compare_files(
        one, {"log": None, "net": one["net"]}, IgnoredDifferences(), is_killed=True
    )
    assert gone.name == "file:log"


def test_files_named_by_time_and_process_are_left_out_of_every_run() -> None:
    def run(*numbers: int) -> CheckedRun:
        """A run whose processes have written such files, and one with a plain name."""
        files = {f"tb/events.out.tfevents.{1795825119 + n}.host.{n}.1": {"size": 40}
                 for n in numbers} | {f"out-{len(numbers)}": {"size": 1}}  # fmt: skip
        key = SnapshotKey("exit")
        made = CheckedRun(Scenario((1,)), Path())
        made.snapshots = [Snapshot(key, 0, {}, {}, files, {}, [])]
        return made

    ignored = IgnoredDifferences()
    base = run(23128)
    note_what_differs(ignored, base, run(23255))
    # One more process has written, since this run has a restart.
    restarted = run(23391, 23402)
    mismatches = compare_snapshots(base, restarted, ignored=ignored)
    assert {each.name for each in mismatches} == {"file:out-1", "file:out-2"}
