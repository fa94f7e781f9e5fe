"""Where to begin in functions that a module defines and does not call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from elasticrun.lint import roles
from elasticrun.lint.naming import named, written
from elasticrun.lint.values import Class
from elasticrun.lint.walk.core import Frame

_WORD = re.compile(r"[^\W\d]\w*")
_EPOCHS = "remaining_epochs_until"
_WORTH = named(f"{_EPOCHS} AdaptiveDataLoader AdaptiveDataParallel Variables")


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
            first, last = (
                getattr(function, "lineno", 1),
                getattr(function, "end_lineno", 1),
            )
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
