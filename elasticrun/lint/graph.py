"""The flow graph of a program: its steps in every order in which they may run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from elasticrun.lint.project import Module
from elasticrun.lint.values import Value

ValuePlace = tuple[int, object]  # a frame or object by its number, and a name in it


class Call(NamedTuple):
    """A link of a chain of calls: who is called, where, and from what call."""

    name: str
    line: int
    module: Module
    outer: Call | None

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
    module: Module

    @property
    def opposite(self) -> Guard:
        return self._replace(holds=not self.holds)


class Sink(NamedTuple):
    """Where a value that is read goes: a test, a log, a file, or other places."""

    kind: Literal[
        "value", "test", "quiet_test", "log", "track", "save", "optimizer", "own",
        "none", "flow",
    ]  # fmt: skip
    places: tuple[ValuePlace, ...] = ()


VALUE = Sink("value")
TEST = Sink("test")
LOG = Sink("log")
TRACK = Sink("track")  # a log in which the step has a meaning
SAVE = Sink("save")
OPTIMIZER = Sink("optimizer")
OWN = Sink("own")  # read only to be changed
NONE = Sink("none")  # read by nothing: the result of a call is dropped


def flow_to(place: ValuePlace) -> Sink:
    """Return the sink of a value that is stored in a place."""
    return Sink("flow", (place,))


class Read(NamedTuple):
    """One reading of a place."""

    place: ValuePlace
    at: ast.AST
    sink: Sink
    step: Step


class Write(NamedTuple):
    """One writing of a place.

    Attributes:
        how: `set`, `update` from its own value, `grow` a container, `weak`, `target`
            of a loop, `bind` of a parameter.
        value: What is written, as far as known.
    """

    place: ValuePlace
    at: ast.AST
    how: str
    value: Value | None
    step: Step
    name: str


class Located(Protocol):
    """What stands at a node, and happens when a step reaches it."""

    @property
    def at(self) -> ast.AST: ...

    @property
    def step(self) -> Step: ...


class Spot(NamedTuple):
    """A node, and a step that reaches it."""

    at: ast.AST
    step: Step


class Standing:
    """What stands at a node of a module."""

    def __init__(self, node: ast.AST, module: Module) -> None:
        self.node = node
        self.module = module

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)


class EpochLoop(Standing):
    """A loop over `remaining_epochs_until`."""

    call: Call | None = None
    outer: EpochLoop | None = None
    head = -1
    bound: ast.expr | None = None
    bound_value: Value | None = None
    guards: tuple[Guard, ...] = ()
    turns: tuple[ast.AST, ...] = ()

    def __init__(self, number: int, node: ast.AST, module: Module) -> None:
        super().__init__(node, module)
        self.number = number


class DataLoop(Standing):
    """A loop over a loader: while it runs, the job may save or stop.

    `remaining_steps_until` is one too, without a loader.

    Attributes:
        text: The loader as the program calls it.
        outer: The loop in whose body it stands.
        sure: False if only a name says that it is a loop over an elastic loader.
        is_elastic: False for a loop over a plain DataLoader.
    """

    call: Call | None = None
    epoch: EpochLoop | None = None
    outer: DataLoop | None = None
    head = -1
    sure = True
    is_elastic = True
    turns: tuple[ast.AST, ...] = ()

    def __init__(self, node: ast.AST, module: Module, text: str, loader: Value) -> None:
        super().__init__(node, module)
        self.text = text
        self.loader = loader

    @property
    def is_inner(self) -> bool:
        """Whether it belongs to a batch of another loop, and so has no boundary."""
        return self.outer is not None and self.outer.sure

    def around(self) -> Iterator[DataLoop]:
        """Yield the loops in whose bodies it stands, the nearest first."""
        loop = self.outer
        while loop is not None:
            yield loop
            loop = loop.outer


class Step(Standing):
    """A statement or head of a loop, in one chain of calls."""

    call: Call | None = None
    epoch: EpochLoop | None = None
    loop: DataLoop | None = None
    frame = 0
    guards: tuple[Guard, ...] = ()
    head_of: DataLoop | EpochLoop | None = None

    def __init__(self, number: int, node: ast.AST, module: Module) -> None:
        super().__init__(node, module)
        self.number = number
        self.following: list[int] = []
        self.reads: list[Read] = []
        self.writes: list[Write] = []

    def is_in(self, loop: DataLoop) -> bool:
        """Return whether it is in a loop's body, or in that of a loop inside."""
        own = self.loop
        return own is loop or (own is not None and loop in own.around())


class Graph:
    """All steps, by number, and the loops among them.

    Attributes:
        repeats: Heads of plain `for` loops and the steps of their bodies, inner ones
            first.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.epochs: list[EpochLoop] = []
        self.loops: list[DataLoop] = []
        self.repeats: list[tuple[int, range]] = []
        self._preceding: list[list[int]] | None = None

    def preceding(self) -> list[list[int]]:
        """Return for each step those that it may follow."""
        if self._preceding is None or len(self._preceding) != len(self.steps):
            self._preceding = [[] for _ in self.steps]
            for step in self.steps:
                for number in step.following:
                    self._preceding[number].append(step.number)
        return self._preceding

    def forward(
        self, starts: Iterable[int], passes: Callable[[Step], bool]
    ) -> set[int]:
        """Return what may run after the starts; only steps that pass are gone through.

        A step that does not pass is reached, but nothing is reached through it.
        """
        reached: set[int] = set()
        todo = [n for start in starts for n in self.steps[start].following]
        while todo:
            number = todo.pop()
            if number in reached:
                continue
            reached.add(number)
            step = self.steps[number]
            if passes(step):
                todo += step.following
        return reached

    def backward(
        self, starts: Iterable[int], passes: Callable[[Step], bool]
    ) -> set[int]:
        """Return what may run before the starts, going only through steps that pass."""
        preceding = self.preceding()
        reached: set[int] = set()
        todo = [n for start in starts for n in preceding[start]]
        while todo:
            number = todo.pop()
            if number in reached or not passes(self.steps[number]):
                continue
            reached.add(number)
            todo += preceding[number]
        return reached
