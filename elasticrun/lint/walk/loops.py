"""Loops as they are written: `for`, `while` and comprehensions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from elasticrun.lint.graph import TEST
from elasticrun.lint.values import Kind, Value, key_of, merged
from elasticrun.lint.walk.iteration import looping
from elasticrun.lint.walk.walk import Evaluate, RunStatement, Walk

_KINDS: dict[type[ast.expr], Kind] = {
    ast.ListComp: "list",
    ast.SetComp: "set",
    ast.GeneratorExp: "list",
}


def _run_for(walk: Walk, node: ast.For | ast.AsyncFor) -> None:
    frame = walk.frame
    walk.step(node)
    walk.iterated.add(node.iter)
    value = walk.evaluate(node.iter)
    before = dict(frame.env)

    def body(element: Value) -> None:
        walk.assign(node.target, element, how="target")
        walk.run(node.body)

    walk.iterate(value, node, body)
    frame.env = merged(frame.env, before)
    if node.orelse:
        walk.run(node.orelse)


def _run_while(walk: Walk, node: ast.While) -> None:
    head = walk.step(node)
    with looping(walk, head, is_skipped=True):
        with walk.into(TEST):
            test = walk.evaluate(node.test)
        walk.current = head
        with walk.guarded(walk.guard(node.test, test.taints)):
            walk.run(node.body)
    is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
    if is_endless:
        walk.here = [each for each in walk.here if each is not head]
    if node.orelse and walk.here:
        walk.run(node.orelse)


# Comprehensions.


def _evaluate_comprehension(
    walk: Walk, node: ast.ListComp | ast.SetComp | ast.GeneratorExp
) -> Value:
    result = Value(_KINDS[type(node)])

    def add() -> None:
        value = walk.evaluate(node.elt)
        result.taints |= value.taints
        result.parts.append(value)

    _nest(walk, node, node.generators, add)
    return walk.made(result)


def _evaluate_dict_comprehension(walk: Walk, node: ast.DictComp) -> Value:
    result = Value("dict")

    def add() -> None:
        key, value = walk.evaluate(node.key), walk.evaluate(node.value)
        result.taints |= key.taints | value.taints
        if (known := key_of(key)) is not None:
            result.attrs[known] = value
        else:
            result.parts.append(value)

    _nest(walk, node, node.generators, add)
    result.is_complete = not result.parts
    return walk.made(result)


def _nest(
    walk: Walk,
    node: ast.expr,
    generators: list[ast.comprehension],
    add: Callable[[], None],
) -> None:
    """Run a comprehension's loops, one within the other, and `add` in the last."""
    frame = walk.frame
    env = dict(frame.env)

    def level(depth: int) -> None:
        if depth == len(generators):
            add()
            return
        generator = generators[depth]

        def body(element: Value) -> None:
            walk.assign(generator.target, element, how="target")
            walk.step(node)
            for test in generator.ifs:
                walk.evaluate(test)
            level(depth + 1)

        walk.iterated.add(generator.iter)
        value = walk.evaluate(generator.iter)
        walk.iterate(value, node, body)

    level(0)
    frame.env = env


STATEMENTS: Mapping[type[ast.stmt], RunStatement] = {
    ast.For: _run_for,
    ast.AsyncFor: _run_for,
    ast.While: _run_while,
}
EXPRESSIONS: Mapping[type[ast.expr], Evaluate] = {
    ast.ListComp: _evaluate_comprehension,
    ast.SetComp: _evaluate_comprehension,
    ast.GeneratorExp: _evaluate_comprehension,
    ast.DictComp: _evaluate_dict_comprehension,
}
