"""`with` and `try`: what surrounds statements."""

from __future__ import annotations

import ast

from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, join, unknown
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.definitions import Definitions


class Contexts(Definitions):
    """Runs what surrounds statements."""

    def _run_With(self, node: ast.With | ast.AsyncWith, frame: Frame) -> None:
        self.step(node, frame)
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            if value.kind == "generator":
                value = self._entered(value, node, frame)
            elif value.kind == "instance" and value.cls and value.cls.find("__enter__"):
                method = self.attribute(value, "__enter__", node, frame)
                entered = self.call_function(method, [], {}, node, frame)
                value = entered if entered.kind not in ("unknown", "const") else value
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, frame)
        outer, loops, entry = self.catching, len(self.loops), self.current
        for item in node.items:
            if "suppress" in written(item.context_expr):
                self.catching += (written(item.context_expr),)
        self.run(node.body, frame)
        self.catching = outer
        if len(self.loops) > loops:
            for item in node.items:
                if _suppresses_stop(item.context_expr):
                    self.note_on(entry, "suppressed_loop", item.context_expr)

    _run_AsyncWith = _run_With

    def _entered(self, value: Value, node: ast.AST, frame: Frame) -> Value:
        """Walk through a generator that manages a context; return what it gives."""
        handed: list[Value] = []
        inner: Frame = value.frame
        function = inner.function
        if function in self.active or not isinstance(function, ast.FunctionDef):
            return unknown()
        inner.yields = handed.append
        self.run_function(function, inner, frame, node)
        inner.yields = None
        return handed[0] if handed else unknown()

    def _run_Try(self, node: ast.Try, frame: Frame) -> None:
        entry = self.step(node, frame)
        first, before = len(self.graph.steps), dict(frame.env)
        loops, outer = len(self.loops), self.catching
        self.catching += tuple(
            "" if each.type is None else written(each.type) for each in node.handlers
        )
        self.run(node.body, frame)
        self.catching = outer
        last = len(self.graph.steps)
        has_loop = len(self.loops) > loops
        if has_loop or any(each.line in _span(node) for each in self.epochs):
            self.note_on(entry, "guarded_loop", node)
        ends = self.here
        if ends and node.orelse:
            self.run(node.orelse, frame)
            ends = self.here
        env = frame.env
        raising = [
            number
            for number in range(first, last)
            if not has_loop or self.graph.steps[number].loop is not None
        ]
        for handler in node.handlers:
            self.here, frame.env = [entry.number, *raising], merged(dict(env), before)
            self.step(handler, frame)
            if handler.type is not None:
                self.evaluate(handler.type, frame)
            if handler.name:
                frame.env[handler.name] = unknown(handler.name)
            self.run(handler.body, frame)
            ends = [*ends, *self.here]
            if self.here:
                env = merged(env, frame.env)
        frame.env = env
        self.here = ends
        if node.finalbody:
            if not self.here:
                self.here = [entry.number]
                self.run(node.finalbody, frame)
                self.here = []
            else:
                self.run(node.finalbody, frame)

    _run_TryStar = _run_Try

    def note_on(self, step: object, kind: str, node: ast.AST) -> None:
        before = self.current
        self.current = step  # type: ignore[assignment]
        self.note(kind, node)
        self.current = before


def _suppresses_stop(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not written(node.func).endswith("suppress"):
        return False
    names = {written(each).rpartition(".")[2] for each in node.args}
    return not names.isdisjoint(("BaseException", "SystemExit", "JobStopped"))


def merged(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    """Return what names may be where two branches meet."""
    if first is second:
        return first
    result = dict(second)
    for name, value in first.items():
        other = second.get(name)
        result[name] = value if other is None or other is value else join(value, other)
    return result


def _span(node: ast.AST) -> range:
    return range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
