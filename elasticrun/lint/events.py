"""What happens at a program's steps: noted by the walk, looked at by the rules."""

from __future__ import annotations

import ast
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from elasticrun.lint.graph import Step, WalkedLoop
from elasticrun.lint.values import NO_TAINTS, Arguments, Value

What = Literal[
    # What is made: a state of the job; `register(**states)`, where not even the number
    # of the states is known; an object that rules ask for, by its role.
    "state", "unseen states", "made",
    # A step or another change of what is trained, by its role: `scheduler`,
    # `optimizer`, `scaler`, `ema`, `weights` changed otherwise, `average` for weights
    # that are kept in a dictionary, `loaded` for a state that replaces the one there.
    "trained",
    "backward",  # gradients are computed of a loss with these taints
    "weighed",  # a loss, by the `weigh` of a model
    "set up",  # how a model trains: what is frozen, or an attribute of a module
    "added",  # something with these taints, to an Accumulator
    "divided",  # what an Accumulator has, by the number of batches
    "changed",  # a field of something saved gets a value: set, updated, or grown
    # Random numbers: a generator of the program's is seeded; any is drawn from.
    "seeded", "drawn",
    "unfixed",  # something is asked that no later start is told again: the time, ...
    # What is seen outside of the process: lines and numbers for people; a file that is
    # saved as a whole, opened, written (or appended unseen), or moved, removed, made.
    "logged", "saved", "opened", "written", "moved",
    "sent",  # a request, a message, a program that is run
    "collective",  # what all replicas must do together
    # Loops: a `break`, a loop that counts; an iterator is made, asked by `next`.
    "left", "counted", "iterated", "asked",
    "signal",  # gets a handler
]  # fmt: skip


@dataclass(eq=False, slots=True)
class Event:
    """Something that happens at a step.

    Attributes:
        value: To what it happens, if that is known.
        name: What is called, or the field that is changed.
        role: Of what is made or trained.
        how: A field is changed, a file is opened, or weights are; where a draw goes.
        text: A file's path or what is changed, as the program writes it.
        given: The values that a call is given, as far as they are seen.
        taints: Those of a loss, or of what is put somewhere.
        turns: The plain loops around it, since the last epoch or dataset loop.
        catching: What the `try` and `suppress` around it catch.
        is_seeded: Whether the generator behind a draw has a seed.
    """

    what: What
    at: ast.AST
    step: Step
    value: Value | None = None
    _: KW_ONLY
    name: str = ""
    role: str = ""
    how: str = ""
    text: str = ""
    given: Arguments = field(default_factory=Arguments)
    taints: frozenset[str] = NO_TAINTS
    loop: WalkedLoop | None = None
    turns: tuple[ast.AST, ...] = ()
    catching: tuple[str, ...] = ()
    is_seeded: bool = False
    registered: bool = field(init=False)

    def __post_init__(self) -> None:
        self.registered = self.value is not None and self.value.is_durable
