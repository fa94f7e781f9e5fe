"""What the walk knows about a value: its kind, how sure, and what stands behind it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrun.lint.project import Module

_uids = itertools.count(1)

NO_TAINTS: frozenset[str] = frozenset()
EMPTY = "empty"  # the data of a container that is made without items
OBJECTS = frozenset(
    [
        "loader",
        "plain_loader",
        "model",
        "optimizer",
        "scheduler",
        "scaler",
        "ema",
        "variables",
        "accumulator",
        "instance",
        "tracker",
        "file",
        "rng",
        "list",
        "dict",
        "set",
    ]
)


class Value:
    """An abstract value.

    Attributes:
        kind: What it is: `loader`, `optimizer`, `const`, `func`, `unknown`, ...
        name: A dotted external name, or what the program calls it.
        sure: Known by its constructor; False if only a name speaks for it.
        taints: What it was computed from: `rank`, `random`, `time`, `epoch`, ...
        attrs: Attributes, or items of a dictionary by constant key.
        parts: The elements of a sequence, or what a wrapper wraps.
        data: A constant, a syntax node, a mode; depends on the kind.
        registered: Saved in every checkpoint.
        is_handed_on: Given to a function that cannot be seen, which may register it.
        in_epoch: The number of the epoch loop in whose body it was made, or 0.
    """

    __slots__ = (
        "also",
        "attrs",
        "cls",
        "data",
        "frame",
        "in_epoch",
        "is_complete",
        "is_handed_on",
        "kind",
        "loaded_by_hand",
        "name",
        "node",
        "owner",
        "parts",
        "registered",
        "sure",
        "taints",
        "uid",
    )

    def __init__(
        self,
        kind: str,
        name: str = "",
        *,
        sure: bool = True,
        taints: frozenset[str] = NO_TAINTS,
        parts: Iterable[Value] = (),
        data: Any = None,
        node: ast.AST | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.sure = sure
        self.taints = taints
        self.attrs: dict[Any, Value] = {}
        self.parts: list[Value] = list(parts)
        self.data = data
        self.node = node
        self.cls: Class | None = None
        self.owner: Value | None = None
        self.frame: Any = None
        self.also: list[Value] = []
        self.registered = False
        self.loaded_by_hand = False
        self.is_complete = True
        self.is_handed_on = False
        self.in_epoch = 0
        self.uid = next(_uids)

    @property
    def is_object(self) -> bool:
        """Whether it has an identity worth keeping when branches meet."""
        return self.kind in OBJECTS

    @property
    def is_durable(self) -> bool:
        """Whether what it holds comes back after a restart."""
        return self.registered or self.kind in ("variables", "accumulator")

    def __repr__(self) -> str:
        return f"Value({self.kind}, {self.name!r})"


class Class:
    """A class of the project.

    Attributes:
        role: What an instance is to the rules: `model`, `state`, `scheduler`, ...
    """

    __slots__ = ("bases", "constants", "frame", "methods", "module", "node", "role")

    def __init__(self, node: ast.ClassDef, module: Module, frame: Any) -> None:
        self.node = node
        self.module = module
        self.frame = frame
        self.bases: list[Value] = []
        self.methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.constants: dict[str, ast.expr] = {}
        self.role = ""

    def lineage(self) -> list[Class]:
        """Return this class and those of the project that it derives from."""
        found: list[Class] = [self]
        for base in self.bases:
            if base.cls is not None:
                found += [each for each in base.cls.lineage() if each not in found]
        return found

    def find(self, name: str) -> tuple[Class, ast.AST] | None:
        """Return the method of that name and the class that defines it."""
        for each in self.lineage():
            if name in each.methods:
                return each, each.methods[name]
        return None


def unknown(name: str = "", taints: frozenset[str] = NO_TAINTS) -> Value:
    """Return a value of which at most the name is known."""
    return Value("unknown", name, sure=False, taints=taints)


def constant(data: Any) -> Value:
    """Return a constant of the program."""
    return Value("const", data=data)


def external(name: str) -> Value:
    """Return something imported from outside of the project."""
    return Value("ext", name)


def is_key(data: object) -> bool:
    """Return whether a constant can be the key of an attribute or item."""
    return isinstance(data, str | int)


def register(value: Value, seen: set[int] | None = None) -> None:
    """Mark a value as saved in every checkpoint, with all that it wraps or may be."""
    seen = set() if seen is None else seen
    if value.uid in seen:
        return
    seen.add(value.uid)
    value.registered = True
    inner = [*value.also]
    if value.kind in ("model", "wrapped", "bound", "list", "tuple", "dict"):
        inner += value.parts
        inner += value.attrs.values() if value.kind in ("list", "tuple", "dict") else []
    for part in inner:
        register(part, seen)


def register_reachable(value: Value, depth: int = 4) -> None:
    """Mark what a State object holds: its save and load speak for them."""
    for child in [*value.attrs.values(), *value.parts]:
        if child.is_object and not child.registered:
            register(child)
            if depth:
                register_reachable(child, depth - 1)


def join(first: Value, second: Value) -> Value:
    """Return what is known where two branches meet."""
    if first is second or second.kind == "unknown":
        return first
    if first.kind == "unknown":
        return second
    if first.kind == "const" and second.kind == "const":
        if first.data == second.data and type(first.data) is type(second.data):
            return first
        return unknown(first.name, first.taints | second.taints)
    if first.kind == "const":
        return second
    if second.kind == "const":
        return first
    if first.is_object and second.is_object:
        if second not in first.also:
            first.also.append(second)
        if first not in second.also:
            second.also.append(first)
    return first
