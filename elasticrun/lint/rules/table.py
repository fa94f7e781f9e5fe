"""All rules by code, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.program import Program
from elasticrun.lint.rules import (
    conversion,
    effects,
    loops,
    ranks,
    states,
    steps,
    volatile,
)

_MODULES = (
    conversion, effects, loops, volatile,
    states, steps, ranks,
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
