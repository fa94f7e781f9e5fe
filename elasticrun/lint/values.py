"""What the walk knows about a value: its kind, and what stands behind it."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from elasticrun.lint.project import Module

MethodDef = ast.FunctionDef | ast.AsyncFunctionDef

next_uid = itertools.count(1).__next__  # of values and of frames, which have places

# Taints say what a value was computed from, and a guard, what decides there.
#   Not the same in each process or start: rank, world_size, generation (the number of
#   restarts), time, entropy (such as a process's number), random (a draw).
#   Of loops: epoch (a number that a restart brings back), enumerated (one that begins
#   at 0 again), modulo (a remainder of something else), batch.
#   Of batches: valid (it leaves padding out), num_batches, accumulated (a sum that an
#   Accumulator has).
#   Of tests: once (`once(key)`), exists (whether a file does).
#   Of files: path, temporary.
#   Of losses: past (of a module that is called past its wrapper); see walk/losses.py.
NO_TAINTS: frozenset[str] = frozenset()
OF_CONTENT = frozenset(("batch",))  # also of a container that gets it
UNFIXED = frozenset(("time", "entropy", "random"))  # another one at each start

# What a value is. The type checker refuses to compare it with a name that is not here.
Kind = Literal[
    # Nothing is known of it; only that it is none of those below.
    "unknown", "opaque",
    # What the program defines or imports, and what is had from that.
    "func", "class", "module", "ext", "instance", "bound",
    # Plain values, and what is iterated.
    "const", "list", "dict", "set", "tuple", "range", "generator", "iterator",
    "wrapped",  # by `zip`, `enumerate`, a progress bar, ...
    # What trains: a parameter or several, a group of an optimizer's, all of its groups.
    "model", "optimizer", "scheduler", "scaler", "ema", "param", "group",
    "param_groups",
    # What loops are over, by elasticrun or without it.
    "epochs", "steps", "loader", "plain_loader",
    # What else rules ask for.
    "variables", "accumulator", "tracker", "file", "rng",
]  # fmt: skip

OBJECTS: frozenset[Kind] = frozenset(
    ("loader", "plain_loader", "model", "optimizer", "scheduler", "scaler", "ema",
     "variables", "accumulator", "instance", "tracker", "file", "rng", "list", "dict",
     "set")
)  # fmt: skip


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """What the walk knows of one value of the program.

    Attributes:
        name: A dotted external name, or what the program calls it.
        taints: What it was computed from: `rank`, `random`, `time`, `epoch`, ...
        parts: The elements of a sequence, or what a wrapper wraps.
        attrs: Attributes, or items of a dictionary by constant key.
        constant: Of a constant: its value.
        mode: Of an open file: how it was opened; "?" if that is not known.
        owner: What it is a part of: a method's object, a parameter's model, ...
        cls: The class itself, or that of an instance or method.
        frame: The walk's frame: of a module its names, of a function those around it,
            of a generator its own.
        is_empty: Of a container: made without items.
        is_complete: Of a container: all its items are in `parts` or `attrs`.
        made_at: The number of the step that makes it, or -1.
        in_epoch: Made in the body of an epoch loop.
        also: What else it may be, where branches meet.
        registered: Saved in every checkpoint.
        is_loaded_by_hand: Filled by the program's own call of `load_state_dict`.
        is_handed_on: Given to a function that cannot be seen, which may register it.
    """

    kind: Kind
    name: str = ""
    _: KW_ONLY
    taints: frozenset[str] = NO_TAINTS
    parts: list[Value] = field(default_factory=list)
    attrs: dict[Any, Value] = field(default_factory=dict)
    constant: Any = None
    mode: str = ""
    node: ast.AST | None = None
    owner: Value | None = None
    cls: Class | None = None
    frame: Any = None
    is_empty: bool = False
    is_complete: bool = True
    made_at: int = -1
    in_epoch: bool = False
    also: list[Value] = field(default_factory=list)
    registered: bool = False
    is_loaded_by_hand: bool = False
    is_handed_on: bool = False
    uid: int = field(default_factory=next_uid)

    def __post_init__(self) -> None:
        # Two values never share a list: each changes its own while the walk goes on.
        self.parts, self.attrs = list(self.parts), dict(self.attrs)

    @property
    def is_object(self) -> bool:
        """Whether it has an identity worth keeping when branches meet."""
        return self.kind in OBJECTS

    @property
    def is_container(self) -> bool:
        """Whether it is a container that the program changes."""
        return self.kind in ("list", "dict", "set")

    @property
    def is_none(self) -> bool:
        return self.kind == "const" and self.constant is None

    @property
    def is_model(self) -> bool:
        """Whether it is a model, of the project or not."""
        is_own = self.cls is not None and self.cls.role == "model"
        return is_own or self.kind == "model"

    def defines(self, method: str) -> bool:
        """Return whether it is an object of the project's with such a method."""
        cls = self.cls if self.kind == "instance" else None
        return cls is not None and cls.find(method) is not None

    @property
    def elements(self) -> list[Value]:
        """The elements of a sequence; of a named tuple, its fields."""
        if self.kind != "instance" or self.cls is None:
            return [*self.parts] if self.kind in ("tuple", "list") else []
        bases = (base for each in self.cls.lineage() for base in each.bases)
        is_tuple = any(each.name.endswith("NamedTuple") for each in bases)
        return [*self.attrs.values()] if is_tuple else []

    @property
    def is_durable(self) -> bool:
        """Whether what it holds comes back after a restart."""
        return self.registered or self.kind in ("variables", "accumulator")


@dataclass(eq=False)
class Arguments:
    """The values that a call is given."""

    args: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)

    @property
    def values(self) -> list[Value]:
        return [*self.args, *self.keywords.values()]

    @property
    def taints(self) -> frozenset[str]:
        return taints_of(self.values)


@dataclass(eq=False, slots=True)
class Class:
    """A class that the project defines.

    Attributes:
        frame: The walk's frame in which it is defined.
        constants: What its body assigns to names.
        role: What an instance is to the rules: `model`, `state`, `scheduler`, ...
    """

    node: ast.ClassDef
    module: Module
    frame: Any
    bases: list[Value] = field(default_factory=list)
    methods: dict[str, MethodDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    role: str = ""

    def lineage(self) -> list[Class]:
        """Return this class and those of the project that it derives from."""
        found: dict[Class, None] = {}
        todo = [self]
        while todo:
            if (each := todo.pop()) not in found:
                found[each] = None
                bases = (base.cls for base in reversed(each.bases))
                todo += [cls for cls in bases if cls is not None]
        return [*found]

    def find(self, name: str) -> tuple[Class, MethodDef] | None:
        """Return the method of that name and the class that defines it."""
        for each in self.lineage():
            if name in each.methods:
                return each, each.methods[name]
        return None


def unknown(taints: frozenset[str] = NO_TAINTS) -> Value:
    """Return a value of which nothing is known but what it was computed from."""
    return Value("unknown", taints=taints)


def constant(value: object) -> Value:
    """Return a constant of the program."""
    return Value("const", constant=value)


def external(name: str) -> Value:
    """Return something imported from outside of the project."""
    return Value("ext", name)


def taints_of(values: Iterable[Value]) -> frozenset[str]:
    """Return what any of some values was computed from."""
    return NO_TAINTS.union(*(value.taints for value in values))


def key_of(value: Value) -> str | int | None:
    """Return the key that a constant can be of an attribute or item, else None."""
    key = value.constant if value.kind == "const" else None
    return key if isinstance(key, str | int) else None


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
    if value.kind == "param" and value.owner is not None and value.owner.kind == "ema":
        inner.append(value.owner)  # whose average this is
    for part in inner:
        register(part, seen)


def join(first: Value, second: Value) -> Value:
    """Return what is known where two branches meet: more of objects than of others."""
    if first is second:
        return first
    vague = [each.kind in ("const", "unknown") for each in (first, second)]
    if all(vague):
        one, other = first.constant, second.constant
        if first.in_epoch and second.in_epoch:  # New in each, whichever it is.
            return unknown(first.taints | second.taints)
        if first.kind == second.kind == "unknown":
            first.taints |= second.taints
        elif type(one) is not type(other) or one != other or first.kind != second.kind:
            return unknown(first.taints | second.taints)
        return first
    if any(vague):
        return second if vague[0] else first
    if first.is_object and second.is_object:
        for each, beside in ((first, second), (second, first)):
            if beside not in each.also:
                each.also.append(beside)
    return first


def merged(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    """Return what names may be where two branches meet."""
    if first is second:
        return first
    result = dict(second)
    for name, value in first.items():
        other = second.get(name)
        result[name] = value if other is None or other is value else join(value, other)
    return result


def element_of(value: Value) -> Value:
    """Return an element of what is iterated, in no particular pass."""
    if value.kind == "param_groups":
        return Value("group", value.name, owner=value.owner)
    if value.kind in ("param", "model"):
        return value
    objects = [each for each in value.parts if each.is_object or each.kind == "tuple"]
    is_held = bool(objects) and value.kind in ("tuple", "list")
    return objects[0] if is_held else unknown(taints=value.taints)


def sampling(dataset: Value) -> list[MethodDef]:
    """Return the methods of a data set of the program that make its samples."""
    if dataset.kind != "instance" or dataset.cls is None:
        return []
    names = ["__getitem__", "__getitems__", "__iter__", "__len__", "__call__"]
    methods: list[MethodDef] = []
    for name in names:  # which grow by what these call
        found = dataset.cls.find(name)
        if found is not None and found[1] not in methods:
            methods.append(found[1])
            names += sorted(fields_of(found[1]))
    return methods


@functools.cache
def fields_of(method: MethodDef) -> frozenset[str]:
    """Return the names of the attributes that a method reads of its object."""
    owner = method.args.args[0].arg if method.args.args else ""
    return frozenset(
        each.attr
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == owner
    )


def loaders_in(value: Value, depth: int = 3) -> list[Value]:
    """Return the loaders that iterating a value iterates."""
    if value.kind in ("loader", "plain_loader"):
        return [value]
    if value.kind not in ("wrapped", "iterator") or depth == 0:
        return []
    return [each for part in value.parts for each in loaders_in(part, depth - 1)]


def elastic_loaders_in(value: Value) -> list[Value]:
    """Return those of them that are elastic."""
    return [each for each in loaders_in(value) if each.kind == "loader"]
