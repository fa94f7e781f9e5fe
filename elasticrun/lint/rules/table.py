"""All rules by code, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.program import Program
from elasticrun.lint.rules import (
    conversion,
    data,
    effects,
    files,
    left_over,
    loops,
    ranks,
    states,
    steps,
    suppressions,
    volatile,
)

_MODULES = (
    suppressions, conversion, files, effects, loops, volatile, left_over,
    states, steps, ranks, data,
)  # fmt: skip

RULES: dict[str, Rule] = {
    value.code: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, Rule)
}

CHECKS: tuple[Callable[[Program], Iterator[Finding]], ...] = tuple(
    check for module in _MODULES for check in getattr(module, "CHECKS", ())
)
