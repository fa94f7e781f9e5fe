"""The project's functions: the walk through their bodies, and their parameters."""

from __future__ import annotations

import ast

from elasticrun.lint import roles
from elasticrun.lint.graph import VALUE, Call, flow_to
from elasticrun.lint.project import statements_of
from elasticrun.lint.values import Arguments, MethodDef, Value, constant, unknown
from elasticrun.lint.walk.arguments import arguments, bound_arguments
from elasticrun.lint.walk.frames import Frame, Function
from elasticrun.lint.walk.walk import Walk


def call_known(walk: Walk, callee: Value, node: ast.Call) -> Value:
    """Walk through a function of the project that a call calls."""
    frame = _frame_for(walk, callee, node)
    if frame is None:
        return unknown(taints=arguments(walk, node).taints)
    return _enter(walk, callee, frame, bound_arguments(walk, callee, frame, node), node)


def call_function(
    walk: Walk, function: Value, given: Arguments, node: ast.AST
) -> Value:
    """Walk through a function of the project with these values."""
    frame = _frame_for(walk, function, node)
    return unknown() if frame is None else _enter(walk, function, frame, given, node)


def _frame_for(walk: Walk, callee: Value, node: ast.AST) -> Frame | None:
    """Return a frame for one more call; None if the walk has gone far enough."""
    function = callee.node
    if function is None or not walk.may_call(function):
        return None
    walk.num_calls[function] += 1
    frame = walk.frame
    line = getattr(node, "lineno", 1)
    link = Call(callee.name, line, frame.module, frame.call, node)
    outer = callee.frame if isinstance(callee.frame, Frame) else None
    module = outer.module if outer is not None else frame.module
    made = Frame(module, function, outer=outer, call=link)
    walk.begun[made.uid] = walk.current
    return made


def _enter(
    walk: Walk, callee: Value, frame: Frame, given: Arguments, node: ast.AST
) -> Value:
    function = callee.node
    assert isinstance(function, Function)
    walk.visited.add(function)
    bind(walk, callee, frame, given)
    if is_generator(function):
        # Its body runs where its values are asked for.
        parts = given.values
        number = walk.current.number
        return Value(
            "generator", callee.name, node=function, parts=parts, frame=frame,
            made_at=number,
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
            is_rank = roles.hint(name) == "rank"
            values[name] = unknown(name, frozenset(("rank",) if is_rank else ()))
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
        wrapper = call_function(walk, decorator, given, each)
        if wrapper.kind == "func" and wrapper is not decorator:
            function = wrapper
    return function


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
