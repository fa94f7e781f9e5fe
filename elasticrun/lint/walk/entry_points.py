"""A walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

from elasticrun.lint.project import Module, Project
from elasticrun.lint.values import Arguments, Value
from elasticrun.lint.walk import (
    assignment,
    calls,
    expressions,
    functions,
    iteration,
    statements,
)
from elasticrun.lint.walk.functions import bind, run_function
from elasticrun.lint.walk.walk import Frame, Function, Handlers, Walk

_HANDLERS = Handlers(
    statements={
        **statements.STATEMENTS,
        **iteration.STATEMENTS,
        **assignment.STATEMENTS,
        **functions.STATEMENTS,
    },
    expressions={
        **expressions.EXPRESSIONS,
        **iteration.EXPRESSIONS,
        **calls.EXPRESSIONS,
    },
    assign=assignment.assign,
    iterate=iteration.iterate,
)


def walk_through(project: Project, module: Module) -> Walk:
    """Walk through a module, then through what it defines and does not call."""
    walk = Walk(project, module, _HANDLERS)
    frame = functions.load_module(walk, module)
    if frame is None:
        return walk
    with walk.inside(frame):
        known = {
            value.node: value
            for value in frame.env.values()
            if isinstance(value.node, Function) and value.frame is frame
        }
        for function in _callers_first(module, known):
            if function not in walk.visited:
                _enter_alone(walk, known[function])
    return walk


def _enter_alone(walk: Walk, value: Value) -> None:
    """Walk through a function as a program of its own, its arguments unknown."""
    function = value.node
    assert isinstance(function, Function)
    walk.visited.add(function)
    walk.here = []
    walk.step(function)
    inner = Frame(walk.frame.module, function, outer=value.frame)
    bind(walk, value, inner, Arguments())
    run_function(walk, function, inner, function)


def _callers_first(module: Module, functions: Iterable[Function]) -> list[Function]:
    """Return functions, those first whose names stand in no other one's text."""
    named_in: collections.Counter[str] = collections.Counter()
    functions = list(functions)
    for each in functions:
        lines = module.lines[each.lineno - 1 : each.end_lineno]
        named_in.update(set(re.findall(r"[^\W\d]\w*", "\n".join(lines))))
    return sorted(functions, key=lambda each: named_in[getattr(each, "name", "")] > 1)
