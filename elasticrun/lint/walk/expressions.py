"""Expressions: what they may be, and which places they read."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import pairwise

from elasticrun.lint import naming
from elasticrun.lint.graph import TEST, Guard
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    NO_TAINTS,
    Arguments,
    Class,
    Kind,
    MethodDef,
    Value,
    constant,
    element_of,
    external,
    join,
    key_of,
    taints_of,
    unknown,
)
from elasticrun.lint.walk import losses
from elasticrun.lint.walk.functions import call_function, decorated
from elasticrun.lint.walk.walk import Evaluate, Walk


def _evaluate_name(walk: Walk, node: ast.Name) -> Value:
    value, owner = walk.frame.look_up(node.id)
    if owner is not None and value.kind not in ("func", "class", "module", "ext"):
        walk.read((owner.uid, node.id), node)
        if value.is_container or value.is_durable or _may_hold(value):
            walk.read((value.uid, "[]"), node)
    if value.kind == "unknown" and naming.is_rank(node.id):
        value.taints |= {"rank"}
    return value


def _may_hold(value: Value) -> bool:
    """Return whether a value may be an array, which a call has made."""
    return value.kind == "unknown" and value.made_at >= 0


# Operators.


def _evaluate_bin_op(walk: Walk, node: ast.BinOp) -> Value:
    left, right = walk.evaluate(node.left), walk.evaluate(node.right)
    if left.kind == "list":
        parts = [*left.parts, *right.parts]
        return walk.made(Value("list", parts=parts, is_complete=False))
    taints = left.taints | right.taints
    if isinstance(node.op, ast.Div):
        if "accumulated" in left.taints and "num_batches" in right.taints:
            walk.note(node, "divided")
        taints = losses.taints_of_quotient(left, right, node.right)
    if isinstance(node.op, ast.Mult):
        taints -= {"num_batches"}
    if isinstance(node.op, ast.MatMult):
        taints = losses.taints_of_product(left, right, node.right)
    if isinstance(node.op, ast.Mod) and "epoch" not in left.taints:
        taints |= {"modulo"}
    return unknown(taints=taints)


# Of a test: what makes it one that not all replicas and starts answer alike.
_CHANGING = frozenset(("rank", "once", "generation", "exists"))


def _evaluate_conditional(walk: Walk, node: ast.IfExp) -> Value:
    # It decides about what the value goes to, and about nothing else.
    with walk.into(walk.sink if walk.sink.kind in ("log", "flow") else TEST):
        test = walk.evaluate(node.test)
    guard = walk.guard(node.test, test.taints)
    first = _under(walk, guard, node.body)
    second = _under(walk, guard.opposite, node.orelse)
    value = join(first, second)
    if value.is_object and "rank" in test.taints and (first.is_none or second.is_none):
        value.taints |= {"rank"}  # whether it is there
    if value.kind in ("unknown", "const"):
        by_rank = test.taints & {"rank"}
        value = unknown(first.taints | second.taints | by_rank)
    return value


def _under(walk: Walk, guard: Guard, node: ast.expr) -> Value:
    """Evaluate what stands under a condition; in a step of its own, if that differs."""
    start = walk.here
    with walk.guarded(guard):
        if not guard.taints & _CHANGING or not any(
            isinstance(each, ast.Call) for each in ast.walk(node)
        ):
            return walk.evaluate(node)
        walk.step(walk.frame.statement)
        value = walk.evaluate(node)
    walk.here = [*walk.here, *start]
    walk.step(walk.frame.statement)
    return value


def _evaluate_bool_op(walk: Walk, node: ast.BoolOp) -> Value:
    values = [walk.evaluate(node.values[0])]
    for test, each in pairwise(node.values):
        guard = walk.guard(test, taints_of(values))
        guard = guard if isinstance(node.op, ast.And) else guard.opposite
        values.append(_under(walk, guard, each))
    objects = [each for each in values if each.is_object]
    is_test = walk.sink.kind in ("test", "quiet_test", "own")
    if objects and not is_test:
        return objects[0]
    return unknown(taints=taints_of(values))


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
            parts += [value] if value.kind == "param" else value.parts
            is_complete &= value.kind in ("list", "tuple") and value.is_complete
        else:
            parts.append(value)
    made = Value(_SEQUENCES[type(node)], parts=parts, taints=taints_of(parts))
    made.is_complete, made.is_empty = is_complete, not node.elts
    return walk.made(made)


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


# Attributes and items: what hangs on a value.


_INNER = frozenset(("module", "_orig_mod"))  # under which a wrapper has its model
_SAME_OBJECT = frozenset(("module", "data", "_orig_mod", "T"))


def attribute(walk: Walk, base: Value, name: str, node: ast.AST) -> Value:
    """Return `base.name`."""
    if base.kind == "ext":
        return external(f"{base.name}.{name}")
    if base.kind == "module":
        found = base.frame.env.get(name) if base.frame is not None else None
        return found or unknown()
    if name in base.attrs:
        value = base.attrs[name]
        walk.read((base.uid, name), node)
        holds = value.is_container or _may_hold(value)
        if holds:
            walk.read((value.uid, "[]"), node)
        if holds or value.is_model or (value.is_object and not base.is_model):
            value.registered |= base.is_durable
        return value
    if base.cls is not None:
        member = _member(walk, base, base.cls, name, node)
        if member is not None:
            return member
    return _other_attribute(walk, base, name, node)


def _member(
    walk: Walk, base: Value, cls: Class, name: str, node: ast.AST
) -> Value | None:
    found = cls.find(name)
    if found is not None:
        definer, function = found
        method = Value("func", name, node=function, cls=definer, frame=definer.frame)
        with walk.inside(definer.frame):
            method = decorated(walk, method)
        decorators = _decorators(function)
        if "staticmethod" not in decorators:
            method.owner = base
        if base.kind == "instance" and decorators & {"property", "cached_property"}:
            return call_function(walk, method, node, Arguments())
        return method
    for each in cls.lineage():
        if name in each.constants:
            with walk.inside(each.frame):
                value = walk.evaluate(each.constants[name])
            if value.is_container:
                value.registered |= base.is_durable
            base.attrs[name] = value
            walk.read((base.uid, name), node)
            return value
    return None


def _other_attribute(walk: Walk, base: Value, name: str, node: ast.AST) -> Value:
    """Return an attribute that nothing in the project defines."""
    if name in _INNER and base.kind == "model" and base.parts:
        return base.parts[0] if base.parts[0].is_object else base
    if name in _SAME_OBJECT and base.kind in ("model", "param", "instance"):
        return base
    if name == "param_groups" and base.kind in ("optimizer", "unknown"):
        return Value("param_groups", base.name, owner=base)
    is_own_model = base.kind == "instance" and base.cls and base.cls.role == "model"
    if base.kind in ("model", "ema") or is_own_model:
        return Value("param", name, owner=base)
    child = unknown(base.taints)
    if base.kind in ("loader", "plain_loader"):
        if name == "dataset" and base.parts:
            return base.parts[0]
        child.taints -= {"enumerated"}
    taint = naming.TAINTS_OF_ATTRIBUTES.get(name)
    if taint is not None and not (taint == "world_size" and base.kind == "loader"):
        child.taints |= {taint}
    if base.kind in ("unknown", "instance", "variables"):
        base.attrs[name] = child
        walk.read((base.uid, name), node)
    return child


# Subscripts.


def _evaluate_subscript(walk: Walk, node: ast.Subscript) -> Value:
    base = walk.evaluate(node.value)
    key = walk.evaluate(node.slice)
    if base.name == naming.ENVIRONMENT:
        return unknown(environment_taints(key))
    value = item(walk, base, key, node)
    if value.kind == "unknown":
        value.taints = losses.taints_of_item(node, value.taints)
    return value


def item(walk: Walk, base: Value, key: Value, node: ast.AST) -> Value:
    """Return `base[key]`."""
    if base.kind == "param_groups":
        return element_of(base)
    if base.kind in ("model", "param"):
        return base
    if base.kind == "accumulator":  # of all replicas, whatever one adds
        return unknown(taints=base.taints)
    known = key_of(key)
    if known is not None:
        return _constant_item(walk, base, known, node)
    taints = base.taints | key.taints
    walk.read((base.uid, "[]"), node)
    candidates = [*base.attrs.values(), *base.parts]
    if base.kind in ("dict", "list", "tuple") and candidates:
        held = ("param", "generator", "iterator")
        objects = [each for each in candidates if each.is_object or each.kind in held]
        return objects[0] if objects else unknown(taints=taints)
    return unknown(taints=taints)


def _constant_item(walk: Walk, base: Value, key: str | int, node: ast.AST) -> Value:
    elements = base.elements
    if isinstance(key, int) and (elements or base.kind in ("tuple", "list")):
        is_there = -len(elements) <= key < len(elements)
        return elements[key] if is_there else unknown(taints=base.taints)
    if key not in base.attrs:
        if base.kind not in ("dict", "unknown", "variables"):
            return unknown(taints=base.taints)
        base.attrs[key] = unknown(base.taints)
        if base.kind == "dict" and [each.name for each in base.parts] == ["list"]:
            base.attrs[key] = walk.made(Value("list", node=node, is_empty=True))
    walk.read((base.uid, key), node)
    value = base.attrs[key]
    # So that what changes the item changes what holds it, too.
    if value.owner is None and (value.is_container or value.kind == "unknown"):
        value.owner = base
    value.registered |= base.is_durable and value.is_container
    return value


def _decorators(function: MethodDef) -> set[str]:
    """Return the names of a function's decorators, without those of their modules."""
    called = [
        each.func if isinstance(each, ast.Call) else each
        for each in function.decorator_list
    ]
    return {written(each).rpartition(".")[2] for each in called}


def environment_taints(key: Value) -> frozenset[str]:
    """Return what a variable of the environment depends on."""
    taint = naming.TAINTS_OF_VARIABLES.get(str(key_of(key)))
    return NO_TAINTS if taint is None else frozenset((taint,))


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
    ast.Attribute: lambda walk, node: attribute(
        walk, walk.evaluate(node.value), node.attr, node
    ),
    ast.Subscript: _evaluate_subscript,
}
