"""`--explain-zones`: the zone of each line, and the loop that makes it replayed."""

from __future__ import annotations

import ast
from collections import defaultdict

from elasticrun.lint.program import Walked
from elasticrun.lint.project import Module
from elasticrun.lint.zones import DESCRIPTIONS


def explain(program: Walked) -> str:
    """Return the program's modules with a zone before each line that was walked."""
    zones: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    modules: dict[str, Module] = {}
    heads = {each.step for each in (*program.graph.loops, *program.graph.epochs)}
    for step in program.graph.steps:
        if isinstance(step.node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        zone = program.zone(step)
        modules[step.module.name] = step.module
        if zone and step not in heads:
            for line in _lines(step.node):
                zones[step.module.name][line].add(zone)
    legend = (f"{name:>4}  {text}" for name, text in DESCRIPTIONS.items())
    parts = ["\n".join(legend)]
    parts += [
        f"{name}\n" + _listing(module, zones[name]) for name, module in modules.items()
    ]
    return "\n\n".join(parts)


def _lines(node: ast.AST) -> range:
    """Return the lines of a simple statement, or the first one of a block."""
    first = getattr(node, "lineno", 0)
    has_body = bool(getattr(node, "body", None)) and not isinstance(node, ast.Lambda)
    last = first if has_body else getattr(node, "end_lineno", first) or first
    return range(first, last + 1)


def _listing(module: Module, zones: dict[int, set[str]]) -> str:
    return "\n".join(
        f"{''.join(sorted(zones.get(number, ()))):>4} {number:4} | {text}".rstrip()
        for number, text in enumerate(module.lines, 1)
    )
