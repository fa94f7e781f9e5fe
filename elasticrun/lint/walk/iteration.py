"""Loops: over loaders, epochs, generators, wrappers of them, and everything else."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elasticrun.lint import roles
from elasticrun.lint.graph import DataLoop, EpochLoop, Step
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, constant, unknown
from elasticrun.lint.walk.core import Frame, Leaving
from elasticrun.lint.walk.methods import Methods

Body = Callable[[Value], None]
MAX_UNROLLED = 8
_COUNTING = frozenset(("trange", "count"))


class Iteration(Methods):
    """Walks through loops."""

    def iterate(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        """Walk through a loop over a value; `body` binds an element and runs."""
        if value.kind == "wrapped":
            self._wrapped(value, node, frame, body)
        elif value.kind == "iterator" and value.parts:
            self.iterate(value.parts[0], node, frame, body)
        elif self._is_loader(value):
            self._data_loop(value, node, frame, body)
        elif value.kind == "epochs":
            self._epoch_loop(value, node, frame, body)
        elif value.kind == "generator":
            self._generator(value, node, frame, body)
        elif value.kind == "instance" and value.cls and value.cls.find("__iter__"):
            self._iterable(value, node, frame, body)
        elif self._is_short(value):
            self._unrolled(value, node, frame, body)
        else:
            if value.kind == "range":
                self.note("counted", node)
            self._repeated(node, frame, body, self._element(value))

    def _element(self, value: Value) -> Value:
        element = element_of(value)
        if value.kind == "range" and self.epoch is None:
            element.taints |= {"epoch"}  # a number that does not depend on restarts
        return element

    def _is_loader(self, value: Value) -> bool:
        if value.kind in ("loader", "plain_loader"):
            return True
        if value.kind != "unknown" or not value.name:
            return False
        return roles.hint(value.name) == "loader"

    def _is_short(self, value: Value) -> bool:
        if value.kind == "dict":
            return value.is_complete and 0 < len(value.attrs) <= MAX_UNROLLED
        if value.kind not in ("list", "tuple") or not value.is_complete:
            return False
        return 0 < len(value.parts) <= MAX_UNROLLED

    # Wrappers.

    def _wrapped(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        inner = self._looped_part(value)
        if value.name == "enumerate":
            shaped = self._counting(body)
        elif value.name == "true_enumerate":
            shaped = self._shaping(body, unknown("batch_index"))
        elif value.name == "zip":
            others = value.parts

            def shaped(element: Value) -> None:
                parts = [element if p is inner else element_of(p) for p in others]
                body(Value("tuple", parts=parts))

        else:
            shaped = body
        if inner is None:
            if value.name in _COUNTING or any(p.kind == "range" for p in value.parts):
                self.note("counted", node)
            self._repeated(node, frame, shaped, unknown(taints=value.taints))
        else:
            self.iterate(inner, node, frame, shaped)

    def _counting(self, body: Body) -> Body:
        """Return the body of an enumerate, whose index counts from 0 at a restart."""
        outside = self.loop

        def counted(element: Value) -> None:
            is_own = self.loop is not outside  # not a list inside of a dataset loop
            index = unknown("index", frozenset(("enumerated",) if is_own else ()))
            body(Value("tuple", parts=[index, element]))

        return counted

    def _shaping(self, body: Body, index: Value) -> Body:
        return lambda element: body(Value("tuple", parts=[index, element]))

    def _looped_part(self, value: Value) -> Value | None:
        """Return the part of a wrapper whose iteration matters most."""
        ranked = sorted(value.parts, key=self._weight, reverse=True)
        return ranked[0] if ranked and self._weight(ranked[0]) else None

    def _weight(self, value: Value) -> int:
        if value.kind in ("epochs", "loader"):
            return 5
        if value.kind in ("wrapped", "iterator"):
            return max((self._weight(part) for part in value.parts), default=0)
        if value.kind == "generator" or self._is_loader(value):
            return 4
        if value.kind == "instance" and value.cls and value.cls.find("__iter__"):
            return 3
        return (
            2 if self._is_short(value) else int(value.kind in ("param_groups", "param"))
        )

    # Loops.

    def _head(
        self, node: ast.AST, frame: Frame, of: DataLoop | EpochLoop | None = None
    ) -> tuple[Step, Leaving]:
        head = self.step(node, frame)
        leaving = Leaving(of)
        frame.loops.append(leaving)
        return head, leaving

    def _close(self, head: Step, leaving: Leaving, frame: Frame) -> None:
        self.lead([*self.here, *leaving.continues], head)
        frame.loops.pop()
        self.here = [head.number, *leaving.breaks]

    def _repeated(
        self, node: ast.AST, frame: Frame, body: Body, element: Value
    ) -> None:
        turns, self.turns = self.turns, (*self.turns, node)
        head, leaving = self._head(node, frame)
        body(element)
        self.repeats.append(
            (head.number, range(head.number + 1, len(self.graph.steps)))
        )
        self._close(head, leaving, frame)
        self.current, self.turns = head, turns

    def _unrolled(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        elements = (
            [constant(key) for key in value.attrs]
            if value.kind == "dict"
            else list(value.parts)
        )
        leaving = Leaving()
        frame.loops.append(leaving)
        turns, self.turns = self.turns, (*self.turns, node)
        for element in elements:
            self.step(node, frame)
            body(element)
            self.here += leaving.continues
            leaving.continues = []
        frame.loops.pop()
        self.here += leaving.breaks
        self.turns = turns

    def _data_loop(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        loop = DataLoop(node, frame.module, loop_text(node), value)
        loop.sure = value.kind != "unknown" and value.sure
        loop.is_elastic = value.kind != "plain_loader"
        loop.call, loop.epoch, loop.outer = frame.call, self.epoch, self.loop
        self.loops.append(loop)
        loop.turns, self.turns = self.turns, ()
        head, leaving = self._head(node, frame, loop)
        loop.head, head.head_of = head.number, loop
        outer = self.loop
        if loop.is_elastic:
            self.loop = loop
        self.step(node, frame)
        body(unknown("batch", frozenset(("batch",))))
        self.loop = outer
        self.turns = loop.turns
        self._close(head, leaving, frame)
        self.current = head

    def _epoch_loop(
        self, value: Value, node: ast.AST, frame: Frame, body: Body
    ) -> None:
        loop = EpochLoop(len(self.epochs) + 1, node, frame.module)
        loop.call, loop.outer, loop.guards = frame.call, self.epoch, self.guards
        loop.bound_value = value.parts[0] if value.parts else None
        made = value.node
        if isinstance(made, ast.Call) and (made.args or made.keywords):
            loop.bound = made.args[0] if made.args else made.keywords[0].value
        self.epochs.append(loop)
        loop.turns, self.turns = self.turns, ()
        head, leaving = self._head(node, frame, loop)
        loop.head, head.head_of = head.number, loop
        outer = self.epoch
        self.epoch = loop
        body(unknown("epoch", frozenset(("epoch",))))
        self.epoch = outer
        self.turns = loop.turns
        self._close(head, leaving, frame)
        self.current = head

    # Generators.

    def _generator(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        inner: Frame = value.frame
        function = inner.function
        if function in self.active or not isinstance(
            function, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            self._repeated(node, frame, body, unknown())
            return
        leaving = Leaving()
        times = [0]

        def handed_out(element: Value) -> None:
            if times[0] >= 4:
                return
            times[0] += 1
            active, self.active = self.active, self.active[:-1]
            frame.loops.append(leaving)
            body(element)
            frame.loops.pop()
            self.active = active
            self.here += leaving.continues
            leaving.continues = []

        inner.yields = handed_out
        inner.exits = []
        self.run_function(function, inner, frame, node)
        inner.yields = None
        self.here += leaving.breaks
        if not self.here:
            self.step(frame.statement, frame)

    def _iterable(self, value: Value, node: ast.AST, frame: Frame, body: Body) -> None:
        method = self.attribute(value, "__iter__", node, frame)
        result = self.call_function(method, [], {}, node, frame)
        if result.kind in (
            "generator",
            "iterator",
            "wrapped",
            "loader",
            "plain_loader",
        ):
            self.iterate(result, node, frame, body)
            return
        loaders = [each for each in value.attrs.values() if each.kind == "loader"]
        if loaders:
            self.iterate(loaders[0], node, frame, body)
        else:
            self._repeated(node, frame, body, unknown())


def element_of(value: Value) -> Value:
    """Return an element of what is iterated, in no particular pass."""
    if value.kind == "param_groups":
        group = Value("group", value.name, sure=value.sure)
        group.owner = value.owner
        return group
    if value.kind in ("param", "model"):
        return value
    if value.kind == "tuple" and value.parts:
        return value.parts[0]
    if value.kind == "wrapped" and value.name == "zip":
        return Value("tuple", parts=[element_of(part) for part in value.parts])
    if value.kind == "list" and value.parts:
        objects = [part for part in value.parts if part.is_object]
        if objects:
            return objects[0]
    return unknown(taints=value.taints)


def loop_text(node: ast.AST) -> str:
    """Return what a loop iterates, as the program writes it."""
    source = getattr(node, "iter", None)
    if source is None:
        return written(node)[:60]
    while isinstance(source, ast.Call):
        if source.args:
            source = source.args[0]
        elif isinstance(source.func, ast.Attribute):
            source = source.func.value
        else:
            break
    return written(source)[:60]
