"""All rules by code."""

from __future__ import annotations

from elasticrun.lint.rules import (
    data,
    effects,
    files,
    leaving,
    left_over,
    loops,
    ranks,
    replayed,
    states,
    steps,
    sums,
    suppressions,
    volatile,
)
from elasticrun.lint.rules.rule import Rule

_MODULES = (
    suppressions, replayed, files, effects, loops, leaving, volatile, sums, left_over,
    states, steps, ranks, data,
)  # fmt: skip

RULES: dict[str, Rule] = {
    value.code: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, Rule)
}
