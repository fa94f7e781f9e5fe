"""All rules by code, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.program import Walked
from elasticrun.lint.rules import (
    beside,
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
    states, steps, ranks, data, beside,
)  # fmt: skip

RULES: dict[str, Rule] = {
    value.code: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, Rule)
}

CHECKS: tuple[Callable[[Walked], Iterator[Finding]], ...] = tuple(
    check for module in _MODULES for check in getattr(module, "CHECKS", ())
)
