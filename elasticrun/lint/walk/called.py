"""A call of something outside of the project, with its evaluated arguments."""

from __future__ import annotations

import ast
from typing import NamedTuple

from elasticrun.lint.values import Value
from elasticrun.lint.walk.core import Frame

Arguments = tuple[list[Value], dict[str, Value]]


class Site(NamedTuple):
    """Where a call stands.

    Attributes:
        is_iterated: Whether a loop takes its elements from what is called.
        given: Arguments that are evaluated already: those of a `partial`.
    """

    node: ast.Call
    frame: Frame
    is_iterated: bool = False
    given: Arguments | None = None


class Called(NamedTuple):
    """One such call.

    Attributes:
        name: The dotted name of what is called.
        is_iterated: Whether the call stands where a loop takes its elements from.
    """

    name: str
    node: ast.Call
    args: list[Value]
    keywords: dict[str, Value]
    frame: Frame
    is_iterated: bool = False

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def values(self) -> list[Value]:
        return [*self.args, *self.keywords.values()]

    @property
    def taints(self) -> frozenset[str]:
        return frozenset().union(*(value.taints for value in self.values))
