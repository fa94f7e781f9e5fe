"""One walk through a program: where it stands, what it has seen, and its doors."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, final

from elasticrun.lint.graph import (
    VALUE,
    Call,
    DataLoop,
    EpochLoop,
    Event,
    Graph,
    Guard,
    Read,
    Sink,
    Step,
    ValuePlace,
    WalkedLoop,
    What,
    Write,
)
from elasticrun.lint.project import Module, Project, statements_of
from elasticrun.lint.values import (
    MethodDef,
    Value,
    constant,
    external,
    next_uid,
    taints_of,
    unknown,
)

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
            return unknown(), self
        return external(name) if name in _BUILTINS else unknown(), None


@dataclass(eq=False)
class Leaving:
    """Where `break` and `continue` of one loop lead from."""

    of: WalkedLoop | None = None
    breaks: list[Step] = field(default_factory=list)
    continues: list[Step] = field(default_factory=list)


Body = Callable[[Value], None]  # binds an element of what is iterated, and runs
RunStatement = Callable[["Walk", Any], None]  # a statement of one type
Evaluate = Callable[["Walk", Any], Value]  # an expression of one type


# How far a walk goes, which must end soon in any program: it may call itself, or one
# function from everywhere, and import a whole library. What lies beyond is unknown.
MAX_STEPS = 15_000
MAX_DEPTH = 24  # of calls, one within the other
MAX_CALLS = 40  # of one function, each of which is walked through
MAX_MODULES = 80
MAX_IMPORTS = 12  # one within the other; two deep only what is about training


class Handlers(NamedTuple):
    """What the walk does at each kind of node; walker.py puts them together."""

    statements: Mapping[type[ast.stmt], RunStatement]
    expressions: Mapping[type[ast.expr], Evaluate]
    assign: Callable[[Walk, ast.expr, Value, str], None]
    iterate: Callable[[Walk, Value, ast.AST, Body], None]


class _Replaced:
    """Gives an attribute of a walk another value while this context lasts."""

    def __init__(self, walk: Walk, name: str, inner: object) -> None:
        self.walk, self.name, self.inner = walk, name, inner

    def __enter__(self) -> None:
        self.outer = getattr(self.walk, self.name)
        setattr(self.walk, self.name, self.inner)

    def __exit__(self, *_: object) -> None:
        setattr(self.walk, self.name, self.outer)


@final
class Walk:
    """One walk through a program, in every order in which its lines may run.

    The handlers move it: they add steps to the flow graph, read and write places, and
    note events. The rules look at what it has seen when it is over.

    Attributes:
        objects: What the program makes: models, loaders, lists, ...
        bases: What has attributes or items, by its number.
        here: The steps from which the next one follows; none behind a `return`.
        current: The step at which reads, writes and events are noted.
        frame: The call or module in which the walk is.
        epoch, loop: The loops in whose bodies the walk is.
        guards: The conditions under which it is where it is.
        sink: Where a value that is read now goes.
        plain_loops: Those around it since the last epoch or dataset loop.
        iterated: The expressions from whose values loops take their elements.
        begun: The steps at which calls begin, by the numbers of their frames.
        depth: How many imports it is in, one within the other.
        saved: The places that the `save` of some state reads.
        wrapped: The AdaptiveDataParallel of itself and of its module, by their numbers.
        seeded: The packages whose random generators have a seed.
        ways: Whether a value sets or updates a target: found once, and asked for in
            every call of the function around.
    """

    def __init__(self, project: Project, root: Module, handlers: Handlers) -> None:
        self.project = project
        self.root = root
        self.handlers = handlers
        self.graph = Graph()
        self.events: list[Event] = []
        self.objects: list[Value] = []
        self.bases: dict[int, Value] = {}
        self.here: list[Step] = []
        self.current = Step(ast.Pass(), root, -1)
        self.frame = Frame(root, self.current.node)
        self.epoch: EpochLoop | None = None
        self.loop: DataLoop | None = None
        self.guards: tuple[Guard, ...] = ()
        self.sink = VALUE
        self.plain_loops: tuple[ast.AST, ...] = ()
        self.iterated: set[ast.expr] = set()
        self.active: list[ast.AST] = []
        self.visited: set[ast.AST] = set()
        self.num_guards = 0
        self.num_calls: Counter[ast.AST] = Counter()
        self.frames: dict[Module, Frame | None] = {}
        self.begun: dict[int, Step] = {}
        self.depth = 0
        self.saved: set[ValuePlace] = set()
        self.wrapped: dict[int, Value] = {}
        self.seeded: set[str] = set()
        self.ways: dict[tuple[ast.AST, ast.AST], str] = {}

    # The doors: what any handler may ask for any node.

    def run(self, body: list[ast.stmt]) -> None:
        """Walk through statements, until one from which none of the others follows."""
        guards, frame = self.guards, self.frame
        for statement in body:
            if not self.here:
                break
            outer, frame.statement = frame.statement, statement
            handler = self.handlers.statements.get(type(statement))
            if handler is not None:
                handler(self, statement)
            else:
                self.step(statement)
            frame.statement = outer
        self.guards = guards

    def evaluate(self, node: ast.expr | None) -> Value:
        """Return what an expression may be, noting its reads and effects."""
        if node is None:
            return constant(None)
        self.graph.spend(1)
        handler = self.handlers.expressions.get(type(node))
        if handler is not None:
            return handler(self, node)
        children = [
            self.evaluate(child)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.expr)
        ]
        return unknown(taints=taints_of(children))

    def assign(self, target: ast.expr, value: Value, *, how: str = "set") -> None:
        """Bind a target, noting the place that is written; `how` is that of a Write."""
        self.handlers.assign(self, target, value, how)

    def iterate(self, value: Value, node: ast.AST, body: Body) -> None:
        """Walk through a loop over a value; `body` binds an element and runs."""
        self.handlers.iterate(self, value, node, body)

    # How far it goes.

    def may_call(self, function: ast.AST) -> bool:
        """Return whether to walk through a function once more."""
        return (
            function not in self.active
            and len(self.active) <= MAX_DEPTH
            and len(self.graph.steps) <= MAX_STEPS
            and self.num_calls[function] < MAX_CALLS
        )

    def may_import(self, module: Module) -> bool:
        """Return whether to walk through a module."""
        if self.depth < 2:
            return True
        has_room = self.depth < MAX_IMPORTS and len(self.frames) < MAX_MODULES
        return has_room and module.is_about_training

    # The flow.

    def step(self, node: ast.AST) -> Step:
        """Add a step behind everything that leads here, and stand on it."""
        number, around = len(self.graph.steps), (self.epoch, self.loop, self.guards)
        module, call = self.frame.module, self.frame.call
        step = Step(node, module, number, call, *around)
        self.graph.steps.append(step)
        self.graph.spend(1 + len(self.here))
        for each in self.here:
            each.following.append(step)
        self.here = [step]
        self.current = step
        return step

    def guard(self, test: ast.AST, taints: frozenset[str]) -> Guard:
        """Return a new condition that holds; its opposite has the same number."""
        self.num_guards += 1
        return Guard(self.num_guards, test, True, taints, self.frame.function)

    def guarded(self, guard: Guard) -> _Replaced:
        """Note the condition under which the steps inside run."""
        return _Replaced(self, "guards", (*self.guards, guard))

    def into(self, sink: Sink) -> _Replaced:
        """Say where the values that are read inside go."""
        return _Replaced(self, "sink", sink)

    def inside(self, frame: Frame) -> _Replaced:
        """Go on in another call, or in a module."""
        return _Replaced(self, "frame", frame)

    # What is noted.

    def read(self, place: ValuePlace, at: ast.AST) -> None:
        self.current.reads.append(Read(place, at, self.sink, self.current, self.guards))

    def write(
        self, place: ValuePlace, at: ast.AST, how: str, value: Value | None, name: str
    ) -> None:
        self.current.writes.append(Write(place, at, how, value, self.current, name))

    def note(
        self,
        at: ast.AST,
        what: What,
        value: Value | None = None,
        **details: Any,
    ) -> None:
        """Note an event here; for its details see Event."""
        self.events.append(Event(what, at, self.current, value, **details))

    def made(self, value: Value) -> Value:
        """Note where an object was made, so that rules can ask for it."""
        value.in_epoch = self.epoch is not None
        if value.node is None:
            value.node = self.current.node
        value.made_at = self.current.number
        self.objects.append(value)
        self.bases[value.uid] = value
        if value.is_container:
            self.write((value.uid, "[]"), self.current.node, "set", value, value.name)
        return value
