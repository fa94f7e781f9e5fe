"""Frames: the names of one call of a function, or of a module's top level."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

from elasticrun.lint.graph import Call, Step, WalkedLoop
from elasticrun.lint.project import Module, statements_of
from elasticrun.lint.values import MethodDef, Value, external, next_uid, unknown

_BUILTINS = frozenset(dir(builtins))

Function = MethodDef | ast.Lambda


@dataclass(eq=False)
class Frame:
    """One call of a function, or the top level of a module.

    Attributes:
        outer: The frame in which the function was defined.
        call: The call that it is of; None at the top level.
        exits: The steps that return.
        yields: What to do with each value that a generator hands out.
    """

    module: Module
    function: ast.AST
    _: KW_ONLY
    outer: Frame | None = None
    call: Call | None = None
    returned: Value | None = None
    yields: Callable[[Value], None] | None = None
    env: dict[str, Value] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)
    exits: list[Step] = field(default_factory=list)
    loops: list[Leaving] = field(default_factory=list)
    uid: int = field(default_factory=next_uid)

    def __post_init__(self) -> None:
        self.statement = self.function

    @cached_property
    def bound(self) -> set[str]:
        """The names that the function assigns."""
        is_def = isinstance(self.function, MethodDef)
        own = statements_of(self.function) if is_def else ()
        targets = (t for each in own for t in getattr(each, "targets", ()))
        return {each.id for each in targets if isinstance(each, ast.Name)}

    def owner(self, name: str) -> Frame | None:
        """Return the frame that holds a name as this one sees it."""
        each: Frame | None = self.outer if name in self.nonlocals else self
        if name in self.globals:
            each = self.top()
        while each is not None:
            if name in each.env:
                return each
            each = each.outer
        return None

    def binder(self, name: str) -> Frame:
        """Return the frame in which an assignment here binds a name."""
        if name in self.globals:
            return self.top()
        return (self.owner(name) or self) if name in self.nonlocals else self

    def top(self) -> Frame:
        """Return the frame of the module."""
        frame = self
        while frame.outer is not None:
            frame = frame.outer
        return frame

    def look_up(self, name: str) -> tuple[Value, Frame | None]:
        """Return what a name is here, and the frame that holds it, if one does."""
        owner = self.owner(name)
        if owner is not None:
            return owner.env[name], owner
        if name in self.bound:  # Further on, so it may be by an earlier turn.
            return unknown(name), self
        return external(name) if name in _BUILTINS else unknown(name), None


@dataclass(eq=False)
class Leaving:
    """Where `break` and `continue` of one loop lead from."""

    of: WalkedLoop | None = None
    breaks: list[Step] = field(default_factory=list)
    continues: list[Step] = field(default_factory=list)
