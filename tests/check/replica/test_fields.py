"""States as fields that can be compared."""

from __future__ import annotations

from elasticrun.check.replica.fields import flatten


def test_nested_values_become_fields() -> None:
    values = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "steps": [1, 2], "x": None}
    assert dict(flatten("opt", values)) == {
        "len(opt.groups)": 1,
        "opt.groups[0].lr": 0.1,
        "opt.groups[0].betas": [0.9, 0.99],
        "opt.steps": [1, 2],
        "opt.x": None,
    }
