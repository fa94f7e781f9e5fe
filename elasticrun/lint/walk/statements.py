"""Statements: where they lead, and what holds in their branches."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elasticrun.lint import roles
from elasticrun.lint.graph import LOG, NONE, OWN, TEST, Sink, flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.quiet import is_lazy, is_quiet
from elasticrun.lint.values import Value, join
from elasticrun.lint.walk.contexts import Contexts, merged
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.expressions import next_number

QUIET_TEST = Sink("quiet_test")
_EXITS = frozenset(("sys.exit", "exit", "quit", "os._exit"))


class Statements(Contexts):
    """Runs statements."""

    def run(self, body: list[ast.stmt], frame: Frame) -> None:
        """Walk through statements, until one from which none of the others follows."""
        guards = self.guards
        for statement in body:
            if not self.here:
                break
            outer, frame.statement = frame.statement, statement
            method: Callable[[ast.stmt, Frame], None] | None = getattr(
                self, "_run_" + type(statement).__name__, None
            )
            if method is not None:
                method(statement, frame)
            else:
                self.step(statement, frame)
            frame.statement = outer
        self.guards = guards

    # Simple statements.

    def _run_Expr(self, node: ast.Expr, frame: Frame) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self.step(node, frame)
        with self.into(NONE):
            self.evaluate(node.value, frame)
        if isinstance(node.value, ast.Call):
            name = written(node.value.func)
            if name in _EXITS:
                self.here = []

    def _run_Return(self, node: ast.Return, frame: Frame) -> None:
        self.step(node, frame)
        with self.into(flow_to((frame.uid, "return"))):
            value = self.evaluate(node.value, frame)
        before = frame.returned
        frame.returned = value if before is None else join(before, value)
        frame.exits += self.here
        self.here = []

    def _run_Raise(self, node: ast.Raise, frame: Frame) -> None:
        self.step(node, frame)
        with self.into(LOG):
            self.evaluate(node.exc, frame)
        self.here = []

    def _run_Assert(self, node: ast.Assert, frame: Frame) -> None:
        self.step(node, frame)
        with self.into(LOG):
            self.evaluate(node.test, frame)

    def _run_Break(self, node: ast.Break, frame: Frame) -> None:
        step = self.step(node, frame)
        if frame.loops:
            frame.loops[-1].breaks.append(step.number)
            self.note("left", node, data=frame.loops[-1].of)
        self.here = []

    def _run_Continue(self, node: ast.Continue, frame: Frame) -> None:
        step = self.step(node, frame)
        if frame.loops:
            frame.loops[-1].continues.append(step.number)
        self.here = []

    def _run_Global(self, node: ast.Global, frame: Frame) -> None:
        frame.globals.update(node.names)

    def _run_Nonlocal(self, node: ast.Nonlocal, frame: Frame) -> None:
        frame.nonlocals.update(node.names)

    def _run_Delete(self, node: ast.Delete, frame: Frame) -> None:
        self.step(node, frame)

    # Branches.

    def _run_If(self, node: ast.If, frame: Frame) -> None:
        self.step(node, frame)
        if _is_main_test(node.test):
            if frame.module is self.root_module:
                self.run(node.body, frame)
            return
        with self.into(sink_of_test(node)):
            test = self.evaluate(node.test, frame)
        truth = self.truth(node.test, frame)
        if truth is not None:
            self.run(node.body if truth else node.orelse, frame)
            return
        taints = self._test_taints(node.test, test)
        start, before, number = self.here, dict(frame.env), next_number()
        with self.guarded(node.test, True, taints, number, frame):
            self.run(node.body, frame)
        first, first_env = self.here, frame.env
        self.here, frame.env = start, before
        with self.guarded(node.test, False, taints, number, frame):
            self.run(node.orelse, frame)
        second = self.here
        if first and second:
            frame.env = merged(first_env, frame.env)
        elif first:
            frame.env = first_env
        self.here = [*first, *(each for each in second if each not in first)]
        if bool(first) != bool(second):
            # One branch leaves: what follows runs under the other one's condition.
            with self.guarded(node.test, bool(first), taints, number, frame):
                left = self.guards
            self.guards = left

    def _test_taints(self, test: ast.expr, value: Value) -> frozenset[str]:
        taints = value.taints
        if isinstance(test, ast.Name | ast.Attribute) and value.kind == "unknown":
            name = test.attr if isinstance(test, ast.Attribute) else test.id
            if roles.hint(name) == "rank":
                taints |= {"rank"}
        return taints

    def _run_Match(self, node: ast.Match, frame: Frame) -> None:
        self.step(node, frame)
        with self.into(TEST):
            subject = self.evaluate(node.subject, frame)
        start, before = self.here, dict(frame.env)
        ends, env, number = list(start), dict(frame.env), next_number()
        for case in node.cases:
            self.here, frame.env = list(start), dict(before)
            with self.guarded(node.subject, True, subject.taints, number, frame):
                self.run(case.body, frame)
            ends += self.here
            env = merged(env, frame.env)
        self.here, frame.env = ends, env

    # Loops.

    def _run_For(self, node: ast.For | ast.AsyncFor, frame: Frame) -> None:
        self.step(node, frame)
        value = self.evaluate_iterable(node.iter, frame)
        before = dict(frame.env)

        def body(element: Value) -> None:
            self.assign(node.target, element, frame, how="target")
            self.run(node.body, frame)

        self.iterate(value, node, frame, body)
        frame.env = merged(frame.env, before)
        for each in ast.walk(node.target):
            if isinstance(each, ast.Name):
                frame.fixed.discard(each.id)
        if node.orelse:
            self.run(node.orelse, frame)

    _run_AsyncFor = _run_For

    def _run_While(self, node: ast.While, frame: Frame) -> None:
        turns, self.turns = self.turns, (*self.turns, node)
        head, leaving = self._head(node, frame)
        with self.into(TEST):
            test = self.evaluate(node.test, frame)
        self.current = head
        is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        with self.guarded(node.test, True, test.taints, next_number(), frame):
            self.run(node.body, frame)
        self._close(head, leaving, frame)
        self.turns = turns
        if is_endless:
            self.here = [each for each in self.here if each != head.number]
        if node.orelse and self.here:
            self.run(node.orelse, frame)


def _is_main_test(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and len(test.comparators) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == "__main__"
        and isinstance(test.ops[0], ast.Eq)
    )


def sink_of_test(node: ast.If) -> Sink:
    """Return what a test is to what it reads: a decision, or only about a log line."""
    if is_lazy(node):
        return OWN
    return QUIET_TEST if is_quiet(node.body) and is_quiet(node.orelse) else TEST
