"""Calls: of the project's functions and classes, which are walked through, and others."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.graph import Call, Sink
from elasticrun.lint.values import (
    NO_TAINTS,
    Class,
    Value,
    constant,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.core import MAX_CALLS, MAX_DEPTH, MAX_STEPS, VALUE, Frame
from elasticrun.lint.walk.expressions import Expressions, flow_to

LOG = Sink("log")
TRACK = Sink("track")  # a log in which the step has a meaning
SAVE = Sink("save")
OPTIMIZER = Sink("optimizer")
_STEPPING = frozenset(("scheduler", "ema", "optimizer"))


class Calls(Expressions):
    """Follows calls."""

    def call(self, node: ast.Call, frame: Frame, *, is_iterated: bool = False) -> Value:
        """Return what a call returns, having walked through the function if known."""
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super":
            return self._super(frame)
        if isinstance(function, ast.Attribute):
            with self.into(VALUE):
                receiver = self.evaluate(function.value, frame)
            if _changes_by_role(receiver, function.attr):
                return self.call_method(receiver, function.attr, node, frame)
            if receiver.kind in ("ext", "module", "instance", "super", "class"):
                callee = self.attribute(receiver, function.attr, function, frame)
            elif function.attr in receiver.attrs:
                callee = receiver.attrs[function.attr]
            else:
                callee = Value("bound", function.attr)
            if callee.kind in ("bound", "param") or (
                callee.kind == "unknown" and receiver.kind != "ext"
            ):
                return self.call_method(receiver, function.attr, node, frame)
        else:
            with self.into(VALUE):
                callee = self.evaluate(function, frame)
        return self.call_value(callee, node, frame, is_iterated=is_iterated)

    def call_value(
        self, callee: Value, node: ast.Call, frame: Frame, *, is_iterated: bool
    ) -> Value:
        """Return what calling a value returns."""
        if callee.kind == "func":
            return self._call_known(callee, node, frame)
        if callee.kind == "class":
            return self._instantiate(callee, node, frame)
        if callee.kind == "ext":
            return self.call_external(callee.name, node, frame, is_iterated=is_iterated)
        if callee.kind == "partial":
            return self._call_partial(callee, node, frame)
        if callee.kind == "instance" and callee.cls is not None:
            if callee.cls.role != "model" and callee.cls.find("__call__"):
                method = self.attribute(callee, "__call__", node, frame)
                return self._call_known(method, node, frame)
        name = ast.unparse(node.func) if callee.kind == "unknown" else callee.name
        return self.call_unknown(callee, name, node, frame, is_iterated=is_iterated)

    # Arguments.

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
                    keywords.update(
                        {k: v for k, v in value.attrs.items() if isinstance(k, str)}
                    )
        return values, keywords

    def _call_known(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        if self._is_listed(callee.name, self.options.non_idempotent):
            self.arguments(node, frame)
            self.note("outside", node, data=callee.name)
            return unknown()
        if self._is_listed(callee.name, self.options.idempotent):
            self.arguments(node, frame)
            return unknown()
        callee_frame = self._frame_for(callee, node, frame)
        if callee_frame is None:
            args, keywords = self.arguments(node, frame)
            return unknown(taints=self.taints_of([*args, *keywords.values()]))
        args, keywords = self._bound_arguments(callee, callee_frame, node, frame)
        return self._enter(callee, callee_frame, args, keywords, node, frame)

    def _is_listed(self, name: str, names: tuple[str, ...]) -> bool:
        return name in names

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
                keywords.update(
                    {k: v for k, v in value.attrs.items() if isinstance(k, str)}
                )
        return args, keywords

    # The project's functions.

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

    # The project's classes.

    def _instantiate(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        cls = callee.cls
        assert cls is not None
        if cls.role in ("loader",):
            return self.call_external("elasticrun.AdaptiveDataLoader", node, frame)
        made = self.made(Value("instance", cls.node.name, node=node))
        made.cls = cls
        constructor = cls.find("__init__")
        if constructor is not None:
            method = self.attribute(made, "__init__", node, frame)
            self._call_known(method, node, frame)
        else:
            self._fill_fields(made, cls, node, frame)
        if cls.role == "state":
            self.note("state_made", node, made, cls.node.name)
            made.registered = True
            register_reachable(made)
        elif cls.role in ("scheduler", "optimizer", "ema", "scaler"):
            self.note(f"{cls.role}_made", node, made)
        return made

    def _fill_fields(
        self, made: Value, cls: Class, node: ast.Call, frame: Frame
    ) -> None:
        """Set the fields of a data class, or keep what an unseen constructor gets."""
        args, keywords = self.arguments(node, frame)
        fields = [
            statement.target.id
            for each in reversed(cls.lineage())
            for statement in each.node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
        ]
        made.attrs.update(zip(fields, args, strict=False))
        made.attrs.update(keywords)
        for name in made.attrs:
            self.write((made.uid, name), node, "set", made.attrs[name], str(name))
        if not fields:
            made.parts = [*args, *keywords.values()]

    def _super(self, frame: Frame) -> Value:
        if frame.cls is None or frame.instance is None:
            return unknown("super")
        value = Value("super", "super")
        value.owner, value.data = frame.instance, frame.cls
        return value

    def _call_partial(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        args, keywords = self.arguments(node, frame)
        function = callee.parts[0]
        args = [*callee.parts[1:], *args]
        keywords = {**callee.attrs, **keywords}
        if function.kind == "func":
            return self.call_function(function, args, keywords, node, frame)
        if function.kind == "ext":
            return self.call_external(
                function.name, node, frame, given=(args, keywords)
            )
        return unknown(taints=self.taints_of(args))

    # What stands below.

    def call_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value:
        raise NotImplementedError

    def call_external(
        self,
        name: str,
        node: ast.Call,
        frame: Frame,
        *,
        is_iterated: bool = False,
        given: tuple[list[Value], dict[str, Value]] | None = None,
    ) -> Value:
        raise NotImplementedError

    def call_unknown(
        self,
        callee: Value,
        name: str,
        node: ast.Call,
        frame: Frame,
        *,
        is_iterated: bool = False,
    ) -> Value:
        raise NotImplementedError


def _changes_by_role(receiver: Value, name: str) -> bool:
    """Return whether a method does what the role of its class says, whatever its body."""
    cls = receiver.cls
    if receiver.kind != "instance" or cls is None or cls.role not in _STEPPING:
        return False
    return name in ("step", "update", "update_parameters", "load_state_dict")


def is_generator(node: ast.AST) -> bool:
    """Return whether a function's own body holds a `yield`."""
    cached: bool | None = getattr(node, "_elasticrun_generator", None)
    if cached is not None:
        return cached
    todo: list[ast.AST] = (
        list(getattr(node, "body", [])) if not isinstance(node, ast.Lambda) else []
    )
    found = False
    while todo and not found:
        each = todo.pop()
        if isinstance(each, ast.Yield | ast.YieldFrom):
            found = True
        elif not isinstance(
            each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            todo.extend(ast.iter_child_nodes(each))
    node._elasticrun_generator = found  # type: ignore[attr-defined]
    return found


def _hinted_taints(name: str) -> frozenset[str]:
    return frozenset(("rank",)) if catalog.hint(name) == "rank" else NO_TAINTS
