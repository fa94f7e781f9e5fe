"""Functions, classes and modules of the project: definitions, arguments, calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticrun.lint import naming
from elasticrun.lint.graph import VALUE, Call, Sink, flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.project import Module, statements_of
from elasticrun.lint.values import (
    NO_TAINTS,
    Arguments,
    Class,
    MethodDef,
    Value,
    constant,
    external,
    unknown,
)
from elasticrun.lint.walk.walk import Frame, Function, RunStatement, Walk


@dataclass(eq=False, kw_only=True)
class Called(Arguments):
    """A call of something outside of the project, its arguments evaluated."""

    name: str
    node: ast.Call

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def text(self) -> str:
        """What a method is called on, as the program writes it."""
        return ""


@dataclass(eq=False, kw_only=True)
class MethodCalled(Called):
    """A call of a method that the project does not define."""

    receiver: Value

    @property
    def taints(self) -> frozenset[str]:
        return self.receiver.taints | super().taints

    @property
    def text(self) -> str:
        assert isinstance(self.node.func, ast.Attribute)
        return written(self.node.func.value)


def called(walk: Walk, name: str, node: ast.Call, sink: Sink | None = None) -> Called:
    """Return a call whose arguments are evaluated."""
    given = arguments(walk, node, sink)
    return Called(given.args, given.keywords, name=name, node=node)


def arguments(walk: Walk, node: ast.Call, sink: Sink | None = None) -> Arguments:
    """Evaluate the arguments of a call; all of them go to one sink."""
    chosen = sink or (VALUE if walk.sink.kind == "none" else walk.sink)
    return _evaluated(walk, node, lambda _: chosen)


def bound_arguments(
    walk: Walk, callee: Value, callee_frame: Frame, node: ast.Call
) -> Arguments:
    """Evaluate each argument with the parameter that it flows to as its sink."""
    function = callee.node
    assert isinstance(function, Function)
    spec = function.args
    names = [each.arg for each in spec.posonlyargs + spec.args]
    if callee.owner is not None:
        names = names[1:]
    known = {*names, *(each.arg for each in spec.kwonlyargs)}

    def sink_of(key: int | str) -> Sink:
        rest = spec.kwarg if isinstance(key, str) else spec.vararg
        if isinstance(key, int) and key < len(names):
            key = names[key]
        if key not in known and rest is not None:
            key = rest.arg
        return flow_to((callee_frame.uid, key))

    return _evaluated(walk, node, sink_of)


def _evaluated(
    walk: Walk, node: ast.Call, sink_of: Callable[[int | str], Sink]
) -> Arguments:
    """Evaluate arguments; `*args` gives what is known of its elements."""
    args: list[Value] = []
    for each in node.args:
        with walk.into(sink_of(len(args))):
            value = walk.evaluate(each)
        if isinstance(each, ast.Starred):
            args += value.parts
        else:
            args.append(value)
    keywords: dict[str, Value] = {}
    for keyword in node.keywords:
        with walk.into(sink_of(keyword.arg or "**")):
            value = walk.evaluate(keyword.value)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        else:
            keywords.update(_unpacked(value))
    return Arguments(args, keywords)


def _unpacked(value: Value) -> dict[str, Value]:
    """Return what `**value` gives; under made-up names where the keys are unknown."""
    found = {str(k): v for k, v in value.attrs.items() if isinstance(k, str)}
    found.update({f"**{i}": each for i, each in enumerate(value.parts)})
    return found


# Calls.


def call_function(
    walk: Walk, callee: Value, node: ast.AST, given: Arguments | None = None
) -> Value:
    """Walk through a function of the project, with a call's arguments or others."""
    function = callee.node
    if not isinstance(function, Function) or not walk.may_call(function):
        if isinstance(node, ast.Call):
            given = given or arguments(walk, node)
        return unknown(taints=given.taints if given else NO_TAINTS)
    walk.num_calls[function] += 1
    walk.visited.add(function)
    caller = walk.frame
    outer = callee.frame if isinstance(callee.frame, Frame) else None
    line = getattr(node, "lineno", 1)
    link = Call(callee.name, line, caller.module, caller.call, node)
    frame = Frame((outer or caller).module, function, outer=outer, call=link)
    walk.begun[frame.uid] = walk.current
    if given is None:
        assert isinstance(node, ast.Call)
        given = bound_arguments(walk, callee, frame, node)
    bind(walk, callee, frame, given)
    if is_generator(function):
        # Its body runs where its values are asked for.
        return Value(
            "generator", callee.name, node=function, parts=given.values, frame=frame,
            made_at=walk.current.number,
        )  # fmt: skip
    result = run_function(walk, function, frame, node)
    if result.kind == "unknown":
        result.taints -= {"enumerated"}
    return result


def run_function(
    walk: Walk, function: Function, callee_frame: Frame, node: ast.AST
) -> Value:
    """Walk through a body whose parameters are bound; return what it returns."""
    place = (callee_frame.uid, "return")
    walk.active.append(function)
    guards = walk.guards
    with walk.inside(callee_frame), walk.into(VALUE):
        if isinstance(function, ast.Lambda):
            with walk.into(flow_to(place)):
                callee_frame.returned = walk.evaluate(function.body)
        else:
            walk.run(function.body)
    walk.guards = guards
    walk.active.pop()
    walk.here = [*walk.here, *callee_frame.exits]
    walk.step(walk.frame.statement)
    walk.read(place, node)
    return callee_frame.returned or constant(None)


def bind(walk: Walk, callee: Value, into: Frame, given: Arguments) -> None:
    """Give the parameters their values, defaults where none is given."""
    function = callee.node
    assert isinstance(function, Function)
    spec = function.args
    names = [each.arg for each in spec.posonlyargs + spec.args]
    values = dict(_defaults(walk, function, into))
    args = [*([callee.owner] if callee.owner is not None else []), *given.args]
    values.update(zip(names, args, strict=False))
    rest = dict(given.keywords)
    for name in [*names, *(each.arg for each in spec.kwonlyargs)]:
        if name in rest:
            values[name] = rest.pop(name)
        elif name not in values:
            is_rank = naming.is_rank(name)
            values[name] = unknown(frozenset(("rank",) if is_rank else ()))
    if spec.vararg is not None:
        values[spec.vararg.arg] = Value("tuple", parts=args[len(names) :])
    if spec.kwarg is not None:
        values[spec.kwarg.arg] = Value("dict", attrs=rest)
    into.env.update(values)
    for name, value in values.items():
        walk.write((into.uid, name), function, "bind", value, name)


def _defaults(walk: Walk, function: Function, into: Frame) -> list[tuple[str, Value]]:
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    last = positional[len(positional) - len(spec.defaults) :]
    parameters = [*last, *spec.kwonlyargs]
    pairs = zip(parameters, [*spec.defaults, *spec.kw_defaults], strict=True)
    with walk.inside(into.outer or into):
        return [(each.arg, walk.evaluate(value)) for each, value in pairs if value]


def decorated(walk: Walk, function: Value) -> Value:
    """Return what the project's own decorators make of a function."""
    node = function.node
    assert isinstance(node, MethodDef)
    for each in reversed(node.decorator_list):
        if not isinstance(each, ast.Name):
            continue
        decorator = walk.frame.look_up(each.id)[0]
        if decorator.kind != "func":
            continue
        given = Arguments([function])
        wrapper = call_function(walk, decorator, each, given)
        if wrapper.kind == "func" and wrapper is not decorator:
            function = wrapper
    return function


def is_generator(node: ast.AST) -> bool:
    """Return whether a function's own body holds a `yield` as or in a statement."""
    cached: bool | None = getattr(node, "_elasticrun_generator", None)
    if cached is None:
        own = () if isinstance(node, ast.Lambda) else statements_of(node)
        values = (getattr(each, "value", None) for each in own)
        cached = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in values)
        node._elasticrun_generator = cached  # type: ignore[attr-defined]
    return cached


# Definitions.


def _run_function_def(walk: Walk, node: MethodDef) -> None:
    frame = walk.frame
    value = Value("func", node.name, node=node, frame=frame)
    frame.env[node.name] = value
    outcome = decorated(walk, value)
    if outcome is not value:
        # Kept under a name that no program has, to be walked through if uncalled.
        frame.env[f"{node.name} undecorated"] = value
        frame.env[node.name] = outcome


def _run_class_def(walk: Walk, node: ast.ClassDef) -> None:
    cls = Class(node, walk.frame.module, walk.frame)
    for base in node.bases:
        root = base.value if isinstance(base, ast.Subscript) else base
        cls.bases.append(walk.evaluate(root))
    for each in node.body:
        if isinstance(each, MethodDef):
            cls.methods[each.name] = each
        elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    cls.constants[target.id] = each.value
    cls.role = _role_of(cls)
    walk.frame.env[node.name] = Value("class", node.name, node=node, cls=cls)


# Imports.


def load_module(walk: Walk, module: Module) -> Frame | None:
    """Walk through a module's top level once; return its names."""
    if module in walk.frames:
        return walk.frames[module]
    tree = module.parse() if walk.may_import(module) else None
    if tree is None:
        walk.frames[module] = None
        return None
    frame = walk.frames[module] = Frame(module, tree)
    outer = walk.epoch, walk.loop, walk.guards
    walk.epoch, walk.loop, walk.guards = None, None, ()
    walk.depth += 1
    with walk.inside(frame):
        walk.step(tree)
        walk.run(tree.body)
    walk.depth -= 1
    walk.epoch, walk.loop, walk.guards = outer
    if not walk.here:
        walk.here = [walk.graph.steps[-1]]
    return frame


def _run_import(walk: Walk, node: ast.Import) -> None:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        walk.frame.env[alias.asname or name] = _imported(walk, name, 0)
        if not alias.asname and "." in alias.name:
            _imported(walk, alias.name, 0)


def _imported(walk: Walk, name: str, level: int) -> Value:
    importer = walk.frame.module
    walk.graph.spend(100)  # It is looked for in several folders.
    module = None if _is_elastic(name) else walk.project.find(name, importer, level)
    if module is None:
        return external(name)
    module.imported_by.add(importer.name)
    return Value("module", name, frame=load_module(walk, module))


def _run_import_from(walk: Walk, node: ast.ImportFrom) -> None:
    frame = walk.frame
    source = node.module or ""
    origin = _imported(walk, source, node.level)
    for alias in node.names:
        if alias.name == "*":
            own = naming.ELASTIC_NAMES if _is_elastic(source) else ()
            known = {name: external(f"{source}.{name}") for name in own}
            if origin.kind == "module" and origin.frame is not None:
                known = dict(origin.frame.env)
            for name, value in known.items():
                frame.env.setdefault(name, value)
            continue
        value = external(f"{source}.{alias.name}")
        if origin.kind == "module" and origin.frame is not None:
            known = origin.frame.env.get(alias.name)
            value = known or _imported(walk, f"{source}.{alias.name}", node.level)
        elif node.level and not source:
            value = _imported(walk, alias.name, node.level)
        frame.env[alias.asname or alias.name] = value


def _role_of(cls: Class) -> str:
    bases = (base for each in cls.lineage() for base in each.bases)
    found = (naming.base_role(base.name) for base in bases if base.kind == "ext")
    role = next(filter(None, found), "")
    if role or cls.methods.keys().isdisjoint(("step", "update")):
        return role
    role = naming.class_role(cls.node.name)
    wanted = "step" if role == "scheduler" else "update"
    return role if wanted in cls.methods else ""


def _is_elastic(name: str) -> bool:
    return name.split(".", 1)[0] in naming.ELASTIC_ROOTS


STATEMENTS: Mapping[type[ast.stmt], RunStatement] = {
    ast.FunctionDef: _run_function_def,
    ast.AsyncFunctionDef: _run_function_def,
    ast.ClassDef: _run_class_def,
    ast.Import: _run_import,
    ast.ImportFrom: _run_import_from,
}
