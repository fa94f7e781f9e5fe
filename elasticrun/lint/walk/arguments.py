"""The arguments of a call, and calls of what is outside of the project with them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from elasticrun.lint.graph import VALUE, Sink, flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.values import Arguments, Value
from elasticrun.lint.walk.frames import Frame, Function
from elasticrun.lint.walk.walk import Walk


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
