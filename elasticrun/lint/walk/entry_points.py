"""A walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

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
    own = [
        value
        for value in frame.env.values()
        if isinstance(value.node, Function) and value.frame is frame
    ]
    with walk.inside(frame):
        for function in reversed(own):  # Callers mostly stand behind what they call.
            if function.node not in walk.visited:
                _enter_alone(walk, function)
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
