"""What the walk carries along: frames, the flow so far, and notes of effects."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from elasticrun.lint.graph import (
    VALUE,
    Call,
    DataLoop,
    EpochLoop,
    Graph,
    Guard,
    Place,
    Read,
    Sink,
    Step,
    Write,
)
from elasticrun.lint.options import Options
from elasticrun.lint.project import Module, Project
from elasticrun.lint.values import NO_TAINTS, Value, constant, external, unknown

_uids = itertools.count(1)
MAX_STEPS = 15_000
MAX_DEPTH = 24
MAX_CALLS = 40  # of one function, each of which is walked through

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Frame:
    """One call of a function, or the top level of a module.

    Attributes:
        outer: The frame in which the function was defined.
        fixed: Names whose constant is known in every pass: parameters, and the
            targets of loops over literals.
        yields: What to do with each value that a generator hands out.
    """

    __slots__ = (
        "call", "cls", "env", "exits", "fixed", "function", "globals", "in_epoch",
        "instance", "loops", "module", "nonlocals", "outer", "returned", "statement",
        "uid", "yields",
    )  # fmt: skip

    def __init__(
        self,
        module: Module,
        function: ast.AST,
        *,
        outer: Frame | None = None,
        call: Call | None = None,
    ) -> None:
        self.uid = next(_uids)
        self.module = module
        self.function = function
        self.outer = outer
        self.call = call
        self.env: dict[str, Value] = {}
        self.fixed: set[str] = set()
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.exits: list[int] = []
        self.loops: list[Leaving] = []
        self.returned: Value | None = None
        self.yields: Callable[[Value], None] | None = None
        self.instance: Value | None = None
        self.cls: Any = None
        self.statement: ast.AST = function
        self.in_epoch = 0


class Leaving:
    """Where `break` and `continue` of one loop lead from."""

    __slots__ = ("breaks", "continues", "of")

    def __init__(self, of: DataLoop | EpochLoop | None = None) -> None:
        self.of = of
        self.breaks: list[int] = []
        self.continues: list[int] = []


class Event:
    """Something that a rule may look at.

    Attributes:
        registered: Whether the object was registered when this happened.
    """

    __slots__ = ("at", "data", "kind", "registered", "step", "value")

    def __init__(
        self, kind: str, at: ast.AST, step: Step, value: Value | None, data: Any
    ) -> None:
        self.kind = kind
        self.at = at
        self.step = step
        self.value = value
        self.data = data
        self.registered = value is not None and value.is_durable


class Core:
    """The state of one walk."""

    def __init__(self, project: Project, options: Options) -> None:
        self.project = project
        self.options = options
        self.graph = Graph()
        self.here: list[int] = []
        self.current = Step(-1, ast.Pass(), Module_placeholder)
        self.epoch: EpochLoop | None = None
        self.loop: DataLoop | None = None
        self.guards: tuple[Guard, ...] = ()
        self.sink = VALUE
        self.events: list[Event] = []
        self.read_log: list[Read] = []
        self.epochs: list[EpochLoop] = []
        self.loops: list[DataLoop] = []
        self.classes: list[Any] = []
        self.objects: list[Value] = []
        self.visited: set[ast.AST] = set()
        self.num_calls: Counter[ast.AST] = Counter()
        self.active: list[ast.AST] = []
        self.has_seeded: set[str] = set()
        self.root_module: Any = None
        self.bases: dict[int, Value] = {}
        self.catching: tuple[str, ...] = ()
        self.ways: dict[tuple[ast.AST, ast.AST], str] = {}
        self.turns: tuple[ast.AST, ...] = ()
        # Heads of plain `for` loops and the steps of their bodies, inner ones first.
        self.repeats: list[tuple[int, range]] = []

    # The flow.

    def step(self, node: ast.AST, frame: Frame) -> Step:
        """Add a step behind everything that leads here, and stand on it."""
        step = Step(len(self.graph.steps), node, frame.module)
        step.call = frame.call
        step.epoch = self.epoch
        step.loop = self.loop
        step.guards = self.guards
        step.frame = frame.uid
        self.graph.steps.append(step)
        for number in self.here:
            self.graph.steps[number].following.append(step.number)
        self.here = [step.number]
        self.current = step
        return step

    def lead(self, numbers: list[int], step: Step) -> None:
        """Add edges to a step that exists already: the way back to a loop's head."""
        for number in numbers:
            self.graph.steps[number].following.append(step.number)

    @contextlib.contextmanager
    def guarded(
        self,
        test: ast.AST,
        holds: bool,
        taints: frozenset[str],
        number: int,
        frame: Frame,
    ) -> Iterator[None]:
        """Note the condition under which the steps inside run."""
        before = self.guards
        self.guards = (
            *before,
            Guard(number, test, holds, taints, frame.function, frame.module),
        )
        try:
            yield
        finally:
            self.guards = before

    @contextlib.contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Say where the values that are read inside go."""
        before, self.sink = self.sink, sink
        try:
            yield
        finally:
            self.sink = before

    # Places.

    def read(self, place: Place, at: ast.AST, sink: Sink | None = None) -> None:
        read = Read(place, at, sink or self.sink, self.current)
        self.current.reads.append(read)
        self.read_log.append(read)

    def write(
        self, place: Place, at: ast.AST, how: str, value: Value | None, name: str
    ) -> None:
        self.current.writes.append(Write(place, at, how, value, self.current, name))

    def note(
        self, kind: str, at: ast.AST, value: Value | None = None, data: Any = None
    ) -> None:
        self.events.append(Event(kind, at, self.current, value, data))

    def made(self, value: Value) -> Value:
        """Note where an object was made, so that rules can ask for it."""
        value.in_epoch = self.epoch.number if self.epoch else 0
        if value.node is None:
            value.node = self.current.node
        value.frame = value.frame or self.current
        self.objects.append(value)
        self.bases[value.uid] = value
        if value.kind in ("list", "dict", "set"):
            self.write((value.uid, "[]"), self.current.node, "set", value, value.name)
        return value

    # Names.

    def owner(self, name: str, frame: Frame) -> Frame | None:
        """Return the frame that holds a name as `frame` sees it."""
        if name in frame.globals:
            return self.module_frame(frame)
        each: Frame | None = frame.outer if name in frame.nonlocals else frame
        while each is not None:
            if name in each.env:
                return each
            each = each.outer
        return None

    def module_frame(self, frame: Frame) -> Frame:
        while frame.outer is not None:
            frame = frame.outer
        return frame

    def look_up(self, name: str, frame: Frame) -> tuple[Value, Frame | None]:
        owner = self.owner(name, frame)
        if owner is not None and name in owner.env:
            return owner.env[name], owner
        if name in _CONSTANTS:
            return constant(_CONSTANTS[name]), None
        return external(name) if name in BUILTINS else unknown(name), None

    def fixed_value(self, node: ast.expr, frame: Frame) -> Value | None:
        """Return a value that is the same whenever this line runs in this frame."""
        if isinstance(node, ast.Constant):
            return constant(node.value)
        if isinstance(node, ast.Name) and node.id in frame.fixed:
            return frame.env.get(node.id)
        return None

    # Parts that stand in other modules.

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Value:
        raise NotImplementedError

    def call(self, node: ast.Call, frame: Frame, *, is_iterated: bool = False) -> Value:
        raise NotImplementedError

    def assign(
        self, target: ast.expr, value: Value, frame: Frame, *, how: str = "set"
    ) -> None:
        raise NotImplementedError

    def run(self, body: list[ast.stmt], frame: Frame) -> None:
        raise NotImplementedError

    def iterate(
        self, value: Value, node: ast.AST, frame: Frame, body: Callable[[Value], None]
    ) -> None:
        raise NotImplementedError

    def load_module(self, module: Module) -> Frame | None:
        raise NotImplementedError

    def call_function(
        self,
        function: Value,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
        frame: Frame,
    ) -> Value:
        raise NotImplementedError

    def taints_of(self, values: list[Value]) -> frozenset[str]:
        taints = NO_TAINTS
        for value in values:
            taints |= value.taints
        return taints


BUILTINS = frozenset(dir(__import__("builtins")))
_CONSTANTS = {"__name__": "__main__"}
Module_placeholder: Any = None
