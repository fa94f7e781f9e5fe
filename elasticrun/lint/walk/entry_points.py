"""A walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from typing import TypeVar

from elasticrun.lint import naming
from elasticrun.lint.naming import named
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
_Known = TypeVar("_Known", bound=Function)
# A function that nobody calls is walked through if it leads to one of these.
_ELASTIC = named(
    "remaining_epochs_until AdaptiveDataLoader AdaptiveDataParallel Variables"
)


def walk_through(project: Project, module: Module) -> Walk:
    """Walk through a module, then through what it defines and does not call."""
    walk = Walk(project, module, _HANDLERS)
    frame = functions.load_module(walk, module)
    if frame is None:
        return walk
    own = [each for each in walk.classes if each.module is module]
    with walk.inside(frame):
        known = {
            value.node: value
            for value in frame.env.values()
            if isinstance(value.node, Function) and value.frame is frame
        }
        leading = _leading_to_elastic(frame, known, own)
        for function in _callers_first(module, known):
            if function not in walk.visited and _is_worth_it(module, function, leading):
                _enter_alone(walk, known[function])
        for cls in own:
            _try_class(walk, cls, leading)
    return walk


def _leading_to_elastic(
    frame: Frame, known: dict[Function, Value], classes: list[Class]
) -> set[str]:
    """Return what is elastic, and what mentions it, directly or not, by their names."""
    bodies: dict[str, set[str]] = {
        name: _words(frame.module, value.node)
        for name, value in frame.env.items()
        if isinstance(value.node, Function) and value.node in known
    }
    for cls in classes:
        words = (_words(cls.module, each) for each in cls.methods.values())
        bodies[cls.node.name] = set().union(*words)
    imported = ((k, v.name) for k, v in frame.env.items() if v.kind == "ext")
    found = {name for name, meant in imported if naming.elastic_name(meant)}
    found |= _ELASTIC
    while more := {name for name, words in bodies.items() if words & found} - found:
        found |= more
    return found


def _is_worth_it(module: Module, function: Function, leading: set[str]) -> bool:
    """Return whether a function that nobody calls leads to something elastic."""
    return not leading.isdisjoint(_words(module, function))


def _words(module: Module, function: Function) -> set[str]:
    """Return the words in a function's text, names among them."""
    lines = module.lines[function.lineno - 1 : function.end_lineno]
    return set(re.findall(r"[^\W\d]\w*", "\n".join(lines)))


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


def _try_class(walk: Walk, cls: Class, leading: set[str]) -> None:
    """Walk through the methods of a class that nothing calls, on one object of it."""
    methods = [
        each
        for name, each in cls.methods.items()
        if name != "__init__"
        and each not in walk.visited
        and _is_worth_it(cls.module, each, leading)
    ]
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
        named_in.update(_words(module, each))
    return sorted(functions, key=lambda each: named_in[getattr(each, "name", "")] > 1)
