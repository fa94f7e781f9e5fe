"""The project's functions: their arguments, and the walk through their bodies."""

from __future__ import annotations

import ast

from elasticrun.lint import roles
from elasticrun.lint.graph import VALUE, Call, Sink, flow_to
from elasticrun.lint.project import statements_of
from elasticrun.lint.values import (
    NO_TAINTS,
    Value,
    constant,
    unknown,
)
from elasticrun.lint.walk.core import MAX_CALLS, MAX_DEPTH, MAX_STEPS, Frame
from elasticrun.lint.walk.expressions import Expressions


class Functions(Expressions):
    """Walks through functions."""

    def arguments(
        self, node: ast.Call, frame: Frame, sink: Sink | None = None
    ) -> tuple[list[Value], dict[str, Value]]:
        """Evaluate the arguments; `*args` gives what is known of its elements."""
        with self.into(sink or (VALUE if self.sink.kind == "none" else self.sink)):
            values: list[Value] = []
            for each in node.args:
                value = self.evaluate(each, frame)
                if isinstance(each, ast.Starred):
                    values += value.parts
                else:
                    values.append(value)
            keywords: dict[str, Value] = {}
            for keyword in node.keywords:
                value = self.evaluate(keyword.value, frame)
                if keyword.arg is not None:
                    keywords[keyword.arg] = value
                else:
                    keywords.update(unpacked(value))
        return values, keywords

    def _bound_arguments(
        self, callee: Value, callee_frame: Frame, node: ast.Call, frame: Frame
    ) -> tuple[list[Value], dict[str, Value]]:
        """Evaluate each argument with the parameter that it flows to as its sink."""
        function = callee.node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        names = [each.arg for each in function.args.posonlyargs + function.args.args]
        if callee.owner is not None:
            names = names[1:]
        args: list[Value] = []
        for each in node.args:
            name = names[len(args)] if len(args) < len(names) else "*"
            with self.into(flow_to((callee_frame.uid, name))):
                value = self.evaluate(each, frame)
            if isinstance(each, ast.Starred):
                args += value.parts
            else:
                args.append(value)
        keywords: dict[str, Value] = {}
        for keyword in node.keywords:
            with self.into(flow_to((callee_frame.uid, keyword.arg or "**"))):
                value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            else:
                keywords.update(unpacked(value))
        return args, keywords

    # Walking through.

    def _frame_for(self, callee: Value, node: ast.AST, frame: Frame) -> Frame | None:
        function = callee.node
        if (
            function is None
            or self.active.count(function) >= 1
            or len(self.active) > MAX_DEPTH
            or len(self.graph.steps) > MAX_STEPS
            or self.num_calls[function] >= MAX_CALLS
        ):
            return None
        self.num_calls[function] += 1
        link = Call(callee.name, getattr(node, "lineno", 1), frame.module, frame.call)
        outer = callee.frame if isinstance(callee.frame, Frame) else None
        module = outer.module if outer is not None else frame.module
        made = Frame(module, function, outer=outer, call=link)
        made.in_epoch = self.epoch.number if self.epoch else 0
        made.instance, made.cls = callee.owner, callee.cls
        return made

    def call_function(
        self,
        function: Value,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
        frame: Frame,
    ) -> Value:
        """Walk through a function with these values."""
        callee_frame = self._frame_for(function, node, frame)
        if callee_frame is None:
            return unknown()
        return self._enter(function, callee_frame, args, keywords, node, frame)

    def _enter(
        self,
        callee: Value,
        callee_frame: Frame,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
        frame: Frame,
    ) -> Value:
        function = callee.node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        self.visited.add(function)
        self.bind(callee, callee_frame, args, keywords)
        if is_generator(function):
            made = Value("generator", callee.name, node=function)
            made.frame, made.data = callee_frame, callee
            made.parts = [*args, *keywords.values()]
            return made
        result = self.run_function(function, callee_frame, frame, node)
        if result.kind == "unknown":
            result.taints -= {"enumerated"}
        return result

    def run_function(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        callee_frame: Frame,
        frame: Frame,
        node: ast.AST,
    ) -> Value:
        """Walk through a body whose parameters are bound; return what it returns."""
        place = (callee_frame.uid, "return")
        self.active.append(function)
        guards = self.guards
        sink, self.sink = self.sink, VALUE
        if isinstance(function, ast.Lambda):
            with self.into(flow_to(place)):
                callee_frame.returned = self.evaluate(function.body, callee_frame)
        else:
            self.run(function.body, callee_frame)
        self.sink = sink
        self.guards = guards
        self.active.pop()
        self.here = [*self.here, *callee_frame.exits]
        self.step(frame.statement, frame)
        self.read(place, node)
        return callee_frame.returned or constant(None)

    # Parameters.

    def bind(
        self,
        callee: Value,
        frame: Frame,
        args: list[Value],
        keywords: dict[str, Value],
    ) -> None:
        """Give the parameters their values, defaults where none is given."""
        function = callee.node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        spec = function.args
        names = [each.arg for each in spec.posonlyargs + spec.args]
        values = dict(self._defaults(function, frame))
        given = ([callee.owner] if callee.owner is not None else []) + args
        values.update(zip(names, given, strict=False))
        rest = dict(keywords)
        for name in [*names, *(each.arg for each in spec.kwonlyargs)]:
            if name in rest:
                values[name] = rest.pop(name)
            elif name not in values:
                values[name] = unknown(name, _hinted_taints(name))
        if spec.vararg is not None:
            values[spec.vararg.arg] = Value("tuple", parts=given[len(names) :])
        if spec.kwarg is not None:
            values[spec.kwarg.arg] = Value("dict")
            values[spec.kwarg.arg].attrs = dict(rest)
        frame.env.update(values)
        frame.fixed.update(values)
        for name, value in values.items():
            self.write((frame.uid, name), function, "bind", value, name)

    def _defaults(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        frame: Frame,
    ) -> list[tuple[str, Value]]:
        spec = function.args
        names = [each.arg for each in spec.posonlyargs + spec.args]
        start = len(names) - len(spec.defaults)
        pairs = list(zip(names[start:], spec.defaults, strict=True))
        pairs += [
            (each.arg, default)
            for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
            if default is not None
        ]
        outer = frame.outer or frame
        return [(name, self.evaluate(default, outer)) for name, default in pairs]


def unpacked(value: Value) -> dict[str, Value]:
    """Return what `**value` gives; under made-up names where the keys are unknown."""
    found = {str(k): v for k, v in value.attrs.items() if isinstance(k, str)}
    found.update({f"**{i}": each for i, each in enumerate(value.parts)})
    return found


def is_generator(node: ast.AST) -> bool:
    """Return whether a function's own body holds a `yield` as or in a statement."""
    cached: bool | None = getattr(node, "_elasticrun_generator", None)
    if cached is None:
        own = () if isinstance(node, ast.Lambda) else statements_of(node)
        cached = any(
            isinstance(_value_of(each), ast.Yield | ast.YieldFrom) for each in own
        )
        node._elasticrun_generator = cached  # type: ignore[attr-defined]
    return cached


def _value_of(statement: ast.AST) -> ast.AST | None:
    value: ast.AST | None = getattr(statement, "value", None)
    return value.value if isinstance(value, ast.Await) else value


def _hinted_taints(name: str) -> frozenset[str]:
    return frozenset(("rank",)) if roles.hint(name) == "rank" else NO_TAINTS
