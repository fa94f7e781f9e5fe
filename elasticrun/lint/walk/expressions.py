"""Expressions: what they may be, and which places they read."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from elasticrun.lint import roles
from elasticrun.lint.graph import TEST
from elasticrun.lint.values import (
    Kind,
    Value,
    constant,
    join,
    key_of,
    taints_of,
    unknown,
)
from elasticrun.lint.walk.losses import taints_of_quotient
from elasticrun.lint.walk.walk import Evaluate, Walk


def _evaluate_name(walk: Walk, node: ast.Name) -> Value:
    value, owner = walk.frame.look_up(node.id)
    if owner is not None and value.kind not in ("func", "class", "module", "ext"):
        walk.read((owner.uid, node.id), node)
        if value.is_container or value.is_durable:
            walk.read((value.uid, "[]"), node)
    if value.kind == "unknown" and roles.hint(node.id) == "rank":
        value.taints |= {"rank"}
    return value


# Operators.


def _evaluate_bin_op(walk: Walk, node: ast.BinOp) -> Value:
    left, right = walk.evaluate(node.left), walk.evaluate(node.right)
    if left.kind == "list" and right.kind == "list":
        return Value("list", parts=[*left.parts, *right.parts])
    if left.kind == "list" and isinstance(node.op, ast.Mult):
        return walk.made(Value("list", parts=left.parts, is_complete=False))
    taints = left.taints | right.taints
    if isinstance(node.op, ast.Div):
        taints = taints_of_quotient(left, right, node.right)
    if isinstance(node.op, ast.Mod) and "epoch" not in left.taints:
        taints |= {"modulo"}
    return unknown(taints=taints)


def _evaluate_conditional(walk: Walk, node: ast.IfExp) -> Value:
    with walk.into(TEST if walk.sink.kind != "log" else walk.sink):
        test = walk.evaluate(node.test)
    guard = walk.guard(node.test, test.taints)
    with walk.guarded(guard):
        first = walk.evaluate(node.body)
    with walk.guarded(guard.opposite):
        second = walk.evaluate(node.orelse)
    value = join(first, second)
    if value.kind in ("unknown", "const"):
        value = unknown(value.name, first.taints | second.taints)
    return value


def _evaluate_bool_op(walk: Walk, node: ast.BoolOp) -> Value:
    values = [walk.evaluate(each) for each in node.values]
    objects = [each for each in values if each.is_object]
    return objects[0] if objects else unknown(taints=taints_of(values))


def _evaluate_named_expr(walk: Walk, node: ast.NamedExpr) -> Value:
    value = walk.evaluate(node.value)
    walk.assign(node.target, value)
    return value


def _evaluate_yield(walk: Walk, node: ast.Yield) -> Value:
    value = walk.evaluate(node.value)
    if walk.frame.yields is not None:
        walk.current = walk.step(node)
        walk.frame.yields(value)
        walk.step(node)
    return unknown()


def _evaluate_yield_from(walk: Walk, node: ast.YieldFrom) -> Value:
    value = walk.evaluate(node.value)
    if walk.frame.yields is not None:
        walk.iterate(value, node, walk.frame.yields)
    return unknown()


# Displays.

_SEQUENCES: dict[type[ast.expr], Kind] = {
    ast.List: "list",
    ast.Tuple: "tuple",
    ast.Set: "set",
}


def _evaluate_sequence(walk: Walk, node: ast.List | ast.Tuple | ast.Set) -> Value:
    parts: list[Value] = []
    is_complete = True
    for element in node.elts:
        value = walk.evaluate(element)
        if isinstance(element, ast.Starred):
            parts += value.parts
            is_complete &= value.kind in ("list", "tuple") and value.is_complete
        else:
            parts.append(value)
    return walk.made(
        Value(
            _SEQUENCES[type(node)],
            parts=parts,
            taints=taints_of(parts),
            is_complete=is_complete,
            is_empty=not node.elts,
        )
    )


def _evaluate_dict(walk: Walk, node: ast.Dict) -> Value:
    made = walk.made(Value("dict", is_empty=not node.keys))
    for key, element in zip(node.keys, node.values, strict=True):
        value = walk.evaluate(element)
        made.taints |= value.taints
        name = walk.evaluate(key) if key is not None else None
        if name is None:
            made.attrs.update(value.attrs)
            continue
        made.taints |= name.taints
        if (known := key_of(name)) is not None:
            made.attrs[known] = value
        else:
            made.parts.append(value)
            made.is_complete = False
    return made


EXPRESSIONS: Mapping[type[ast.expr], Evaluate] = {
    ast.Constant: lambda _, node: constant(node.value),
    ast.Name: _evaluate_name,
    ast.BinOp: _evaluate_bin_op,
    ast.IfExp: _evaluate_conditional,
    ast.BoolOp: _evaluate_bool_op,
    ast.NamedExpr: _evaluate_named_expr,
    ast.Lambda: lambda walk, node: Value("func", "lambda", node=node, frame=walk.frame),
    ast.Starred: lambda walk, node: walk.evaluate(node.value),
    ast.Await: lambda walk, node: walk.evaluate(node.value),
    ast.Yield: _evaluate_yield,
    ast.YieldFrom: _evaluate_yield_from,
    ast.List: _evaluate_sequence,
    ast.Tuple: _evaluate_sequence,
    ast.Set: _evaluate_sequence,
    ast.Dict: _evaluate_dict,
}
