"""ER306, ER308: tensors of modules that are not saved, or updated too often."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import Spot
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked
from elasticrun.lint.rules.states import ER306, field_of, fields_in, stored
from elasticrun.lint.rules.steps import ER308, cut_loaders, in_micro_batch

_TENSORS = re.compile(r"^torch\.(?:zeros|ones|full|empty|rand|randn|tensor|eye)\(")
_IN_PLACE = re.compile(r"^(?:add|sub|mul|div|lerp|copy|index_add|scatter_add)_$")


def _plain_tensors(program: Walked) -> Iterator[Finding]:
    """Yield tensors of modules that are no buffers, and that methods update."""
    for cls in program.walk.classes if program.graph.loops else ():
        constructor = cls.methods.get("__init__")
        if cls.role != "model" or constructor is None:
            continue
        others = [each for each in cls.methods.values() if each is not constructor]
        updated = _updated(others) if "get_extra_state" not in cls.methods else set()
        for node in ast.walk(constructor):
            value = written(node.value) if isinstance(node, ast.Assign) else ""
            for field in (
                sorted(stored(node) & updated) if _TENSORS.match(value) else ()
            ):
                message = (
                    f"{cls.node.name}.{field} is updated and no buffer of the module, "
                    "so no checkpoint has it"
                )
                help_text = f'make it one: self.register_buffer("{field}", ...)'
                spot = program.spot_in(cls, node)
                yield program.finding(ER306, spot, message, help_text=help_text)


def _updated(methods: Iterable[ast.AST]) -> set[str]:
    """Return the fields that methods make from their old values, and never anew."""
    updated: set[str] = set()
    anew: set[str] = set()
    for node in (each for method in methods for each in ast.walk(method)):
        if isinstance(node, ast.AugAssign):
            updated |= field_of(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _IN_PLACE.match(node.func.attr):
                updated |= field_of(node.func.value)
        elif isinstance(node, ast.Assign):
            is_sum = isinstance(node.value, ast.BinOp)
            old = {each.attr for each in fields_in(node.value)} if is_sum else set()
            updated |= stored(node) & old
            anew |= stored(node) - old
    return updated - anew


def _moved(program: Walked) -> Iterator[Finding]:
    """Yield calls by which modules update tensors of theirs in each micro-batch."""
    moving = {
        name
        for cls in program.walk.classes
        for name, method in cls.methods.items()
        if cls.role == "model" and name != "forward" and _updated([method])
    }
    cut = cut_loaders(program)
    for step in program.graph.steps if moving and cut else ():
        call = step.node.value if isinstance(step.node, ast.Expr) else None
        function = call.func if isinstance(call, ast.Call) else None
        is_moving = isinstance(function, ast.Attribute) and function.attr in moving
        if is_moving and in_micro_batch(step, cut):
            message = (
                "a module's tensor is updated in each micro-batch, not once a step"
            )
            yield program.finding(ER308, Spot(step.node, step), message)


CHECKS = (_plain_tensors, _moved)
