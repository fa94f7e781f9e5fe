"""A walk from a module's top, and from functions that nothing in it calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from elasticrun.lint import roles
from elasticrun.lint.naming import named, written
from elasticrun.lint.options import LintOptions
from elasticrun.lint.project import Module, Project
from elasticrun.lint.values import (
    Arguments,
    Class,
    Value,
)
from elasticrun.lint.walk import (
    assignment,
    calls,
    definitions,
    expressions,
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
        **definitions.STATEMENTS,
    },
    expressions={
        **expressions.EXPRESSIONS,
        **iteration.EXPRESSIONS,
        **calls.EXPRESSIONS,
    },
    assign=assignment.assign,
    iterate=iteration.iterate,
)
_WORD = re.compile(r"[^\W\d]\w*")
_EPOCHS = "remaining_epochs_until"
# A function that nobody calls is walked through if it leads to one of these.
_WORTH = named(f"{_EPOCHS} AdaptiveDataLoader AdaptiveDataParallel Variables")


def walk_through(project: Project, options: LintOptions, module: Module) -> Walk:
    """Walk through a module, then through what it defines and does not call."""
    walk = Walk(project, options, module, _HANDLERS)
    frame = definitions.load_module(walk, module)
    if frame is None:
        return walk
    own = [each for each in walk.classes if each.module is module]
    entries = Entries(frame, own)
    with walk.inside(frame):
        for value, function in _functions(frame, entries):
            if function not in walk.visited and entries.is_worth_it(function):
                _enter_alone(walk, value)
        for cls in own:
            _try_class(walk, cls, entries)
    return walk


def _functions(frame: Frame, entries: Entries) -> list[tuple[Value, ast.AST]]:
    """Return the functions that a module defines, callers before what they call."""
    found = [
        (value, value.node)
        for value in frame.env.values()
        if value.kind == "func" and value.frame is frame and value.node is not None
    ]
    return sorted(found, key=lambda each: entries.order(each[1], each[0].name))


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


def _try_class(walk: Walk, cls: Class, entries: Entries) -> None:
    """Walk through the methods of a class that nothing calls, on one object of it."""
    methods = [
        each
        for name, each in cls.methods.items()
        if name != "__init__" and each not in walk.visited and entries.is_worth_it(each)
    ]
    if not methods or cls.role in ("model", "dataset", "state"):
        return
    made = walk.made(Value("instance", cls.node.name, node=cls.node, cls=cls))
    _enter_method(walk, made, "__init__")
    # Those with an epoch loop first: they call the others.
    for each in sorted(methods, key=lambda each: entries.order(each, each.name)):
        if each not in walk.visited:
            _enter_method(walk, made, each.name)


def _enter_method(walk: Walk, made: Value, name: str) -> None:
    assert made.cls is not None
    if made.cls.find(name) is not None:
        method = attribute(walk, made, name, made.cls.node)
        if method.kind == "func":
            _enter_alone(walk, method)


class Entries:
    """Which of a module's functions hold something elastic, and which call others."""

    def __init__(self, frame: Frame, classes: Iterable[Class]) -> None:
        self._module = frame.module
        self._names: dict[ast.AST, frozenset[str]] = {}
        imported = {
            name: roles.elastic_name(value.name)
            for name, value in frame.env.items()
            if value.kind == "ext"
        }
        bodies = {
            name: self._names_in(value.node)
            for name, value in frame.env.items()
            if value.kind == "func" and value.node is not None
        }
        for cls in classes:
            bodies[cls.node.name] = frozenset().union(
                *(self._names_in(each) for each in cls.methods.values())
            )
        elastic = {name for name, meant in imported.items() if meant}
        epochs = {name for name, meant in imported.items() if meant == _EPOCHS}
        self._elastic = _leading_to(elastic | _WORTH, bodies)
        self._epochs = _leading_to(epochs | {_EPOCHS}, bodies)
        self._called = frozenset().union(*bodies.values())

    def is_worth_it(self, function: ast.AST) -> bool:
        """Return whether a function that nobody calls holds something elastic."""
        if self._names_in(function) & self._elastic:
            return True
        return any(
            isinstance(each, ast.For) and "loader" in written(each.iter).lower()
            for each in ast.walk(function)
        )

    def order(self, function: ast.AST, name: str) -> tuple[bool, bool]:
        """Return a key that sorts what leads to epochs first, and callers first."""
        return not self._names_in(function) & self._epochs, name in self._called

    def _names_in(self, function: ast.AST) -> frozenset[str]:
        """Return the words in a function's text, names among them."""
        if function not in self._names:
            first = getattr(function, "lineno", 1)
            last = getattr(function, "end_lineno", first)
            text = "\n".join(self._module.lines[first - 1 : last])
            self._names[function] = frozenset(_WORD.findall(text))
        return self._names[function]


def _leading_to(goals: set[str], bodies: dict[str, frozenset[str]]) -> set[str]:
    """Return the goals, and the names of what mentions them, directly or not."""
    found = set(goals)
    while True:
        more = {name for name, names in bodies.items() if names & found} - found
        if not more:
            return found
        found |= more
