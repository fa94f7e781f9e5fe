"""A walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from typing import TypeVar

from elasticrun.lint.options import LintOptions
from elasticrun.lint.project import Module, Project
from elasticrun.lint.values import Arguments, Class, Value
from elasticrun.lint.walk import (
    assignment,
    calls,
    expressions,
    functions,
    iteration,
    statements,
)
from elasticrun.lint.walk.expressions import attribute
from elasticrun.lint.walk.frames import Frame, Function
from elasticrun.lint.walk.functions import bind, run_function
from elasticrun.lint.walk.walk import Handlers, Walk

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
_Known = TypeVar("_Known", bound=Function)


def walk_through(project: Project, options: LintOptions, module: Module) -> Walk:
    """Walk through a module, then through what it defines and does not call."""
    walk = Walk(project, options, module, _HANDLERS)
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
        for cls in walk.classes:
            if cls.module is module:
                _try_class(walk, cls)
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


def _try_class(walk: Walk, cls: Class) -> None:
    """Walk through the methods of a class that nothing calls, on one object of it."""
    methods = [each for each in cls.methods.values() if each not in walk.visited]
    if not methods or cls.role in ("model", "dataset", "state"):
        return
    made = walk.made(Value("instance", cls.node.name, node=cls.node, cls=cls))
    _enter_method(walk, made, "__init__")
    for each in _callers_first(cls.module, methods):
        if each not in walk.visited:
            _enter_method(walk, made, each.name)


def _enter_method(walk: Walk, made: Value, name: str) -> None:
    assert made.cls is not None
    if made.cls.find(name) is not None:
        method = attribute(walk, made, name, made.cls.node)
        if method.kind == "func":
            _enter_alone(walk, method)


def _callers_first(module: Module, functions: Iterable[_Known]) -> list[_Known]:
    """Return functions, those first whose names stand in no other one's text."""
    named_in: collections.Counter[str] = collections.Counter()
    functions = list(functions)
    for each in functions:
        lines = module.lines[each.lineno - 1 : each.end_lineno]
        named_in.update(set(re.findall(r"[^\W\d]\w*", "\n".join(lines))))
    return sorted(functions, key=lambda each: named_in[getattr(each, "name", "")] > 1)
