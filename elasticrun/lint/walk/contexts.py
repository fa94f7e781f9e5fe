"""`with` and `try`: what surrounds statements."""

from __future__ import annotations

import ast
import sys

from elasticrun.lint.graph import Step
from elasticrun.lint.naming import STOPS, last_name, written
from elasticrun.lint.values import Value, merged, unknown
from elasticrun.lint.walk.attributes import call_method
from elasticrun.lint.walk.frames import Frame
from elasticrun.lint.walk.functions import run_function
from elasticrun.lint.walk.walk import RunStatement, Walk


def _run_with(walk: Walk, node: ast.With | ast.AsyncWith) -> None:
    walk.step(node)
    for item in node.items:
        value = walk.evaluate(item.context_expr)
        if value.kind == "generator":
            value = _entered(walk, value, node)
        elif value.defines("__enter__"):
            entered = call_method(walk, value, "__enter__", node)
            value = entered if entered.kind not in ("unknown", "const") else value
        if item.optional_vars is not None:
            walk.assign(item.optional_vars, value)
    outer, loops, entry = walk.catching, len(walk.graph.loops), walk.current
    for item in node.items:
        if "suppress" in written(item.context_expr):
            walk.catching += (written(item.context_expr),)
    walk.run(node.body)
    walk.catching = outer
    if len(walk.graph.loops) > loops:
        for item in node.items:
            if _suppresses_stop(item.context_expr):
                walk.note(item.context_expr, "suppressed", step=entry)


def _entered(walk: Walk, value: Value, node: ast.AST) -> Value:
    """Walk through a generator that manages a context; return what it gives."""
    handed: list[Value] = []
    inner: Frame = value.frame
    function = inner.function
    if function in walk.active or not isinstance(function, ast.FunctionDef):
        return unknown()
    inner.yields = handed.append
    run_function(walk, function, inner, node)
    inner.yields = None
    return handed[0] if handed else unknown()


def _run_try(walk: Walk, node: ast.Try) -> None:
    entry = walk.step(node)
    first, before = len(walk.graph.steps), dict(walk.frame.env)
    loops, outer = len(walk.graph.loops), walk.catching
    walk.catching += tuple(
        "" if each.type is None else written(each.type) for each in node.handlers
    )
    walk.run(node.body)
    walk.catching = outer
    has_loop = len(walk.graph.loops) > loops
    # Of a body with a dataset loop only the loop is taken to raise.
    raising = [
        step
        for step in walk.graph.steps[first:]
        if not has_loop or step.loop is not None
    ]
    lines = range(node.lineno, (node.end_lineno or 0) + 1)
    if has_loop or any(each.line in lines for each in walk.graph.epochs):
        walk.note(node, "guarded", step=entry)
    if walk.here and node.orelse:
        walk.run(node.orelse)
    _run_handlers(walk, node, [entry, *raising], before)
    if node.finalbody:
        is_left = not walk.here
        if is_left:
            walk.here = [entry]
        walk.run(node.finalbody)
        if is_left:
            walk.here = []


def _run_handlers(
    walk: Walk, node: ast.Try, starts: list[Step], before: dict[str, Value]
) -> None:
    """Walk through the handlers, each behind all steps that may raise."""
    frame = walk.frame
    ends, env = walk.here, frame.env
    for handler in node.handlers:
        walk.here, frame.env = list(starts), merged(dict(env), before)
        walk.step(handler)
        if handler.type is not None:
            walk.evaluate(handler.type)
        if handler.name:
            frame.env[handler.name] = unknown(handler.name)
        walk.run(handler.body)
        ends = [*ends, *walk.here]
        if walk.here:
            env = merged(env, frame.env)
    walk.here, frame.env = ends, env


def _suppresses_stop(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not written(node.func).endswith("suppress"):
        return False
    return not STOPS.isdisjoint(map(last_name, node.args))


STATEMENTS: dict[type[ast.stmt], RunStatement] = {
    ast.With: _run_with,
    ast.AsyncWith: _run_with,
    ast.Try: _run_try,
}
if sys.version_info >= (3, 11):
    STATEMENTS[ast.TryStar] = _run_try
