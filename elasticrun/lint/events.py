"""What happens at a program's steps: noted by the walk, looked at by the rules."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from elasticrun.lint.graph import Step, WalkedLoop
from elasticrun.lint.values import Arguments, Value


class Event:
    """Something that happens at a step.

    Attributes:
        at: The node that does it.
        what: What happens: one of the types below.
        value: To what it happens, if that is known.
        registered: Whether the value was registered when it happened.
    """

    __slots__ = ("at", "registered", "step", "value", "what")

    def __init__(self, at: ast.AST, step: Step, what: Any, value: Value | None) -> None:
        self.at = at
        self.step = step
        self.what = what
        self.value = value
        self.registered = value is not None and value.is_durable


# What is made.


class StateMade(NamedTuple):
    """A state of the job: a loader, Variables, what is registered, ..."""

    name: str


class UnseenStates(NamedTuple):
    """`register(**states)`, where not even the number of the states is known."""


class Made(NamedTuple):
    """An object that rules ask for.

    Attributes:
        role: `loader`, `optimizer`, `scheduler`, `tracker`, `rng`, ...
        name: What was called, if that is outside of the project.
        given: What it was given, as far as that is seen.
    """

    role: str
    name: str = ""
    given: Arguments = Arguments()


# What is changed.


class Trained(NamedTuple):
    """A step of what is trained, or another change of it.

    Attributes:
        role: `scheduler`, `optimizer`, `scaler`, `ema`, `weights` changed otherwise, or
            `average` for weights that are kept in a dictionary; `loaded` for a state
            that replaces the one that is there.
        how: The method or function that changes weights.
    """

    role: str
    how: str = ""


class Backward(NamedTuple):
    """Gradients are computed; `taints` are those of the loss."""

    taints: frozenset[str]


class Changed(NamedTuple):
    """A field of something saved, or an optimizer's setting, gets a value.

    Attributes:
        how: `set`, `update` from its own value, or `grow` of a container.
        field: The attribute, or the item's key.
        text: The target as the program writes it.
    """

    how: str
    field: str
    text: str


# Random numbers.


class Seeded(NamedTuple):
    """A generator gets a seed: the value, or a global one."""

    name: str
    values: list[Value]


class Draw(NamedTuple):
    """A random draw: from the value, or from a global generator.

    Attributes:
        is_keyed: Whether it is given a generator or seed of its own.
        is_seeded: Whether the generator behind it has a seed.
    """

    name: str
    is_keyed: bool
    is_seeded: bool


# What is seen outside of the process.


class Logged(NamedTuple):
    """A line or number for people to look at."""


class Saved(NamedTuple):
    """A file written as a whole."""

    name: str


class FileOpened(NamedTuple):
    """The value is a file that is opened; `text` is its path as written."""

    path: Value
    text: str
    mode: str


class FileWritten(NamedTuple):
    """The value, an open file, is written; or a file is appended that nobody sees."""


class FileMoved(NamedTuple):
    """A file or folder is renamed, removed or made.

    Attributes:
        keywords: The names of the arguments: `missing_ok`, `exist_ok`, ...
        catching: What the `try` and `suppress` around it catch.
    """

    name: str
    keywords: set[str]
    catching: tuple[str, ...]


class Outside(NamedTuple):
    """A request, a message, a program that is run."""

    name: str


class Collective(NamedTuple):
    """What all replicas must do together."""

    name: str


class PortTaken(NamedTuple):
    """The process listens at a port."""

    name: str


class JobNeeded(NamedTuple):
    """Something of elasticrun is called, which makes the job if it is the first."""


# Loops.


class Left(NamedTuple):
    """A `break` leaves a loop."""

    loop: WalkedLoop | None


class Counted(NamedTuple):
    """A loop over range() or something else that counts."""


class Zipped(NamedTuple):
    """Several things are iterated together."""

    values: list[Value]


class IteratorMade(NamedTuple):
    """The value is iterated by hand."""


class NextCalled(NamedTuple):
    """The value is asked for one element.

    Attributes:
        turns: The plain loops around it, since the last epoch or dataset loop.
        has_default: Whether it is told what to give where nothing is left.
    """

    turns: tuple[ast.AST, ...]
    has_default: bool


class Guarded(NamedTuple):
    """A `try` stands around a loop."""


class Suppressed(NamedTuple):
    """A `suppress` that catches a stop stands around a loop."""
