"""The flow graph of a program: steps in every order, and what happens at each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

from elasticrun.lint.project import Module
from elasticrun.lint.values import NO_TAINTS, Arguments, Value

# What a program may cost, in steps that are walked or searched, not in seconds: what is
# found does not depend on the machine. Long trainings take a hundredth of it.
MAX_WORK = 2_000_000

ValuePlace = tuple[int, object]  # a frame or object by its number, and a name in it


def _any(_: Step) -> bool:
    return True


class TooMuchError(Exception):
    """A program takes more steps than the linter has for one."""


class Call(NamedTuple):
    """A link of a chain of calls: who is called, where, and from what call."""

    name: str
    line: int
    module: Module
    outer: Call | None
    at: ast.AST

    def links(self) -> list[Call]:
        """Return the calls from the outermost to this one."""
        return [*(self.outer.links() if self.outer else []), self]


class Guard(NamedTuple):
    """A condition under which a step runs.

    Attributes:
        number: The same for both branches of one `if`.
        holds: Whether the test is true here.
        function: The function whose text holds the `if`.
    """

    number: int
    test: ast.AST
    holds: bool
    taints: frozenset[str]
    function: ast.AST

    @property
    def opposite(self) -> Guard:
        return self._replace(holds=not self.holds)


class Sink(NamedTuple):
    """Where a value that is read goes: a test, a log, a file, or other places."""

    kind: Literal[
        "value", "test", "quiet_test", "log", "track", "save", "optimizer", "content",
        "own", "none", "flow",
    ]  # fmt: skip
    places: tuple[ValuePlace, ...] = ()


VALUE = Sink("value")
TEST = Sink("test")
LOG = Sink("log")
TRACK = Sink("track")  # a log in which the step has a meaning
SAVE = Sink("save")
OPTIMIZER = Sink("optimizer")
CONTENT = Sink("content")  # what a container holds that a method is called on
OWN = Sink("own")  # read only to be changed
NONE = Sink("none")  # read by nothing: the result of a call is dropped


def flow_to(place: ValuePlace) -> Sink:
    """Return the sink of a value that is stored in a place."""
    return Sink("flow", (place,))


class Read(NamedTuple):
    """One reading of a place.

    Attributes:
        guards: The tests around it: those of its step, and those in its statement.
    """

    place: ValuePlace
    at: ast.AST
    sink: Sink
    step: Step
    guards: tuple[Guard, ...]


class Write(NamedTuple):
    """One writing of a place.

    Attributes:
        how: `set`, `update` from its own value, `grow` a container, `weak` (the place
            keeps some of what it had), `target` of a loop, `bind` of a parameter,
            `drop` of what a name held, for something else.
        value: What is written, as far as known.
    """

    place: ValuePlace
    at: ast.AST
    how: str
    value: Value | None
    step: Step
    name: str


class Site(NamedTuple):
    """A node, and a step that reaches it."""

    at: ast.AST
    step: Step


@dataclass(eq=False, repr=False)
class Step:
    """A statement or head of a loop, in one chain of calls.

    Attributes:
        number: Its position among the steps of the graph.
        epoch, loop: The loops in whose bodies it is.
        following: The steps that may run next.
    """

    node: ast.AST
    module: Module
    number: int
    call: Call | None = None
    epoch: EpochLoop | None = None
    loop: DataLoop | None = None
    guards: tuple[Guard, ...] = ()
    following: list[Step] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    def is_in(self, loop: WalkedLoop) -> bool:
        """Return whether it is in a loop's body, or in that of a loop inside."""
        around = [self.loop, *self.loop.around()] if self.loop is not None else []
        return loop is self.epoch or loop in around


@dataclass(eq=False, repr=False)
class WalkedLoop:
    """A loop of epochs or over data.

    Attributes:
        step: Its head, which asks for the next element.
        plain_loops: Those around it since the last one of these, outer ones first.
    """

    step: Step
    plain_loops: tuple[ast.AST, ...]

    @property
    def at(self) -> ast.AST:
        return self.step.node

    @property
    def line(self) -> int:
        return self.step.line

    @property
    def epoch(self) -> EpochLoop | None:
        """The epoch loop in whose body it stands."""
        return self.step.epoch

    @property
    def outer(self) -> DataLoop | None:
        """The dataset loop in whose body it stands."""
        return self.step.loop


@dataclass(eq=False, repr=False)
class EpochLoop(WalkedLoop):
    """A loop over `remaining_epochs_until`."""

    bound: ast.expr | None


@dataclass(eq=False, repr=False)
class DataLoop(WalkedLoop):
    """A loop over a loader: while it runs, the job may save or stop.

    `remaining_steps_until` is one too, without a loader.

    Attributes:
        is_elastic: False for a loop over a plain DataLoader.
    """

    text: str
    loader: Value
    is_elastic: bool

    @property
    def is_inner(self) -> bool:
        """Whether it belongs to a batch of another loop, and so has no boundary."""
        return self.outer is not None

    def around(self) -> Iterator[DataLoop]:
        """Yield the loops in whose bodies it stands, the nearest first."""
        loop = self.outer
        while loop is not None:
            yield loop
            loop = loop.outer


class Graph:
    """All steps, and the loops among them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.epochs: list[EpochLoop] = []
        self.loops: list[DataLoop] = []
        self._work = 0

    def spend(self, amount: int) -> None:
        """Count what is looked at; whatever depends on a program's size does so."""
        self._work += amount
        if self._work > MAX_WORK:
            raise TooMuchError

    def forward(
        self, starts: Iterable[Step], passes: Callable[[Step], bool] = _any
    ) -> set[Step]:
        """Return what may run after the starts; only steps that pass are gone through.

        A step that does not pass is reached, but nothing is reached through it.
        """
        reached: set[Step] = set()
        todo = [each for start in starts for each in start.following]
        while todo:
            step = todo.pop()
            if step in reached:
                continue
            reached.add(step)
            if passes(step):
                todo += step.following
        self.spend(len(reached))
        return reached

    def backward(
        self, starts: Iterable[Step], passes: Callable[[Step], bool] = _any
    ) -> set[Step]:
        """Return what may run before the starts, going only through steps that pass."""
        self.spend(len(self.steps))
        preceding: dict[Step, list[Step]] = {step: [] for step in self.steps}
        for step in self.steps:
            for each in step.following:
                preceding[each].append(step)
        reached: set[Step] = set()
        todo = [each for start in starts for each in preceding[start]]
        while todo:
            step = todo.pop()
            if step in reached or not passes(step):
                continue
            reached.add(step)
            todo += preceding[step]
        return reached


What = Literal[
    # What is made: a state of the job; `register(**states)`, where not even the number
    # of the states is known; an object that rules ask for, by its role.
    "state", "unseen states", "made",
    # A step or another change of what is trained, by its role: `scheduler`,
    # `optimizer`, `scaler`, `ema`, `weights` changed otherwise, `loaded` for a state
    # that replaces the one there.
    "trained",
    "backward",  # gradients are computed of a loss with these taints
    "weighed",  # a loss, by the `weigh` of a model
    # A forward pass through an AdaptiveDataParallel, or past it, by its own module.
    "through", "past",
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
        how: A field is changed, a file opened, a state loaded; where a draw goes.
        text: A file's path or what is changed, as the program writes it.
        given: The values that a call is given, as far as they are seen.
        taints: Those of a loss, or of what is put somewhere.
        plain_loops: Those around it since the last epoch or dataset loop.
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
    plain_loops: tuple[ast.AST, ...] = ()
    is_seeded: bool = False
    registered: bool = field(init=False)

    def __post_init__(self) -> None:
        self.registered = self.value is not None and self.value.is_durable
