"""Statements: where they lead, and what holds in their branches."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elasticrun.lint import catalog
from elasticrun.lint.values import Class, Value, external, join, unknown
from elasticrun.lint.walk.assignment import Assignment
from elasticrun.lint.graph import NONE, OWN, Sink
from elasticrun.lint.quiet import is_lazy, is_quiet
from elasticrun.lint.walk.calls import LOG
from elasticrun.lint.walk.core import TEST, Frame
from elasticrun.lint.walk.expressions import flow_to, next_number

QUIET_TEST = Sink("quiet_test")
_EXITS = frozenset(("sys.exit", "exit", "quit", "os._exit"))


class Statements(Assignment):
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

    def _run_Expr(self, node: ast.Expr, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, ast.Constant):
            return
        self.step(node, frame)
        with self.into(NONE):
            self.evaluate(node.value, frame)
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name in _EXITS:
                self.here = []

    def _run_Return(self, node: ast.Return, frame: Frame) -> None:  # noqa: N802
        self.step(node, frame)
        with self.into(flow_to((frame.uid, "return"))):
            value = self.evaluate(node.value, frame)
        before = frame.returned
        frame.returned = value if before is None else join(before, value)
        frame.exits += self.here
        self.here = []

    def _run_Raise(self, node: ast.Raise, frame: Frame) -> None:  # noqa: N802
        self.step(node, frame)
        with self.into(LOG):
            self.evaluate(node.exc, frame)
        self.here = []

    def _run_Assert(self, node: ast.Assert, frame: Frame) -> None:  # noqa: N802
        self.step(node, frame)
        with self.into(LOG):
            self.evaluate(node.test, frame)

    def _run_Break(self, node: ast.Break, frame: Frame) -> None:  # noqa: N802
        step = self.step(node, frame)
        if frame.loops:
            frame.loops[-1].breaks.append(step.number)
            self.note("left", node, data=frame.loops[-1].of)
        self.here = []

    def _run_Continue(self, node: ast.Continue, frame: Frame) -> None:  # noqa: N802
        step = self.step(node, frame)
        if frame.loops:
            frame.loops[-1].continues.append(step.number)
        self.here = []

    def _run_Global(self, node: ast.Global, frame: Frame) -> None:  # noqa: N802
        frame.globals.update(node.names)

    def _run_Nonlocal(self, node: ast.Nonlocal, frame: Frame) -> None:  # noqa: N802
        frame.nonlocals.update(node.names)

    def _run_Delete(self, node: ast.Delete, frame: Frame) -> None:  # noqa: N802
        self.step(node, frame)

    # Definitions and imports.

    def _run_FunctionDef(  # noqa: N802
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame
    ) -> None:
        value = Value("func", node.name, node=node)
        value.frame, value.data = frame, frame.module
        frame.env[node.name] = value

    _run_AsyncFunctionDef = _run_FunctionDef  # noqa: N815

    def _run_ClassDef(self, node: ast.ClassDef, frame: Frame) -> None:  # noqa: N802
        cls = Class(node, frame.module, frame)
        for base in node.bases:
            root = base.value if isinstance(base, ast.Subscript) else base
            cls.bases.append(self.evaluate(root, frame))
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                cls.methods[each.name] = each
            elif (
                isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
            ):
                targets = (
                    each.targets if isinstance(each, ast.Assign) else [each.target]
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        cls.constants[target.id] = each.value
        cls.role = _role_of(cls)
        value = Value("class", node.name, node=node)
        value.cls = cls
        frame.env[node.name] = value
        self.classes.append(cls)

    def _run_Import(self, node: ast.Import, frame: Frame) -> None:  # noqa: N802
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.env[alias.asname or name] = self._imported(name, frame, 0)
            if not alias.asname and "." in alias.name:
                self._imported(alias.name, frame, 0)

    def _imported(self, name: str, frame: Frame, level: int) -> Value:
        module = (
            None if _is_elastic(name) else self.project.find(name, frame.module, level)
        )
        if module is None:
            return external(name)
        value = Value("module", name)
        value.data = self.load_module(module)
        module.imported_by.add(frame.module.name)
        return value

    def _run_ImportFrom(self, node: ast.ImportFrom, frame: Frame) -> None:  # noqa: N802
        source = node.module or ""
        origin = self._imported(source, frame, node.level)
        for alias in node.names:
            if alias.name == "*":
                if origin.kind == "module" and origin.data is not None:
                    for key, value in list(origin.data.env.items()):
                        frame.env.setdefault(key, value)
                continue
            value = external(f"{source}.{alias.name}")
            if origin.kind == "module" and origin.data is not None:
                known = origin.data.env.get(alias.name)
                value = known or self._imported(
                    f"{source}.{alias.name}", frame, node.level
                )
            elif node.level and not source:
                value = self._imported(alias.name, frame, node.level)
            frame.env[alias.asname or alias.name] = value

    # Branches.

    def _run_If(self, node: ast.If, frame: Frame) -> None:  # noqa: N802
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
            if catalog.hint(name) == "rank":
                taints |= {"rank"}
        return taints

    def _run_Match(self, node: ast.Match, frame: Frame) -> None:  # noqa: N802
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

    def _run_For(self, node: ast.For | ast.AsyncFor, frame: Frame) -> None:  # noqa: N802
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

    _run_AsyncFor = _run_For  # noqa: N815

    def _run_While(self, node: ast.While, frame: Frame) -> None:  # noqa: N802
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

    # Contexts and exceptions.

    def _run_With(self, node: ast.With | ast.AsyncWith, frame: Frame) -> None:  # noqa: N802
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
        outer = self.catching
        for item in node.items:
            if "suppress" in ast.unparse(item.context_expr):
                self.catching += (ast.unparse(item.context_expr),)
        self.run(node.body, frame)
        self.catching = outer

    _run_AsyncWith = _run_With  # noqa: N815

    def _entered(self, value: Value, node: ast.AST, frame: Frame) -> Value:
        """Walk through a context manager made of a generator; return what it hands out."""
        handed: list[Value] = []
        inner: Frame = value.frame
        function = inner.function
        if function in self.active or not isinstance(function, ast.FunctionDef):
            return unknown()
        inner.yields = handed.append
        self.run_function(function, inner, frame, node)
        inner.yields = None
        return handed[0] if handed else unknown()

    def _run_Try(self, node: ast.Try, frame: Frame) -> None:  # noqa: N802
        entry = self.step(node, frame)
        first, before = len(self.graph.steps), dict(frame.env)
        loops, outer = len(self.loops), self.catching
        self.catching += tuple(
            "" if each.type is None else ast.unparse(each.type)
            for each in node.handlers
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

    _run_TryStar = _run_Try  # noqa: N815

    def note_on(self, step: object, kind: str, node: ast.AST) -> None:
        before = self.current
        self.current = step  # type: ignore[assignment]
        self.note(kind, node)
        self.current = before


def merged(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    """Return what names may be where two branches meet."""
    if first is second:
        return first
    result = dict(second)
    for name, value in first.items():
        other = second.get(name)
        result[name] = value if other is None or other is value else join(value, other)
    return result


def _role_of(cls: Class) -> str:
    for each in cls.lineage():
        for base in each.bases:
            if base.kind == "ext":
                role = catalog.base_role(base.name)
                if role:
                    return role
    if "step" in cls.methods or "update" in cls.methods:
        role = catalog.class_role(cls.node.name)
        wanted = "step" if role == "scheduler" else "update"
        return role if wanted in cls.methods else ""
    return ""


def _is_elastic(name: str) -> bool:
    return name.split(".", 1)[0] in catalog.ELASTIC_ROOTS


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


def _span(node: ast.AST) -> range:
    return range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)


def sink_of_test(node: ast.If) -> Sink:
    """Return what a test is to what it reads: a decision, or only about a log line."""
    if is_lazy(node):
        return OWN
    return QUIET_TEST if is_quiet(node.body) and is_quiet(node.orelse) else TEST
