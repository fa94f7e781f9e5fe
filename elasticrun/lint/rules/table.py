"""All rules by code, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.program import Walked
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

# Codes that were rules: what they found, and why they are gone.
_UNDONE = "retired: undone where the replay ends (ER107 finds what each start changes)"
RETIRED: dict[str, str] = {
    "ER101": f"LR scheduler stepped in replayed code; {_UNDONE}",
    "ER102": f"counter updated from its own value in replayed code; {_UNDONE}",
    "ER103": f"saved container grows in replayed code; {_UNDONE}",
    "ER108": f"saved value multiplied or added in replayed code; {_UNDONE}",
    "ER111": "logged again; retired: harmless (ER110 finds trackers that count calls)",
    "ER112": "weights saved in replayed code; retired: it found next to nothing",
    "ER201": "loop of epochs in another loop; retired: the job raises LoopOrderError",
    "ER204": "loader looped over in its own loop; retired: it raises LoopOrderError",
    "ER205": "loader made inside a loop; retired: it raises LoopOrderError",
    "ER310": "two states of one name; retired: the second raises StateNameError",
    "ER505": "order that draws each time it is read; retired: it found next to nothing",
}

CHECKS: tuple[Callable[[Walked], Iterator[Finding]], ...] = tuple(
    check for module in _MODULES for check in getattr(module, "CHECKS", ())
)
