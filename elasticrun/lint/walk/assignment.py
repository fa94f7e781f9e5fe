"""Assignments: what a name, attribute or item becomes, and what that changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from elasticrun.lint.graph import OPTIMIZER, OWN, SAVE, VALUE, Sink, flow_to
from elasticrun.lint.naming import last_name, written
from elasticrun.lint.values import OF_CONTENT, Value, element_of, key_of, unknown
from elasticrun.lint.walk.externals import grow
from elasticrun.lint.walk.walk import RunStatement, Walk

_BOUNDING = frozenset(("max", "min", "maximum", "minimum", "fmax", "fmin"))


def assign(walk: Walk, target: ast.expr, value: Value, how: str) -> None:
    """Bind a target, noting the place that is written."""
    if isinstance(target, ast.Name):
        _assign_name(walk, target, value, how)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        with walk.into(OWN):
            base = walk.evaluate(target.value)
        name: object = target.attr if isinstance(target, ast.Attribute) else None
        if isinstance(target, ast.Subscript):
            name = key_of(walk.evaluate(target.slice))
            if name is None and how == "set":
                how = "set" if _fills(walk, target.slice) else "weak"
                base.taints |= value.taints & OF_CONTENT
        _assign_member(walk, base, "[]" if name is None else name, target, value, how)
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(walk, target, value, how)
    elif isinstance(target, ast.Starred):
        walk.assign(target.value, unknown(taints=value.taints), how=how)


def _fills(walk: Walk, key: ast.expr) -> bool:
    """Return whether each iteration of `for key in range(n):` sets its own item."""
    plain_loop = next(reversed(walk.plain_loops), None)
    if (
        not isinstance(plain_loop, ast.For)
        or walk.frame.statement not in plain_loop.body
    ):
        return False
    is_whole = (
        isinstance(plain_loop.iter, ast.Call)
        and last_name(plain_loop.iter.func) == "range"
    )
    return is_whole and written(plain_loop.target) == written(key)


def _assign_name(walk: Walk, target: ast.Name, value: Value, how: str) -> None:
    name = target.id
    owner = walk.frame.binder(name)
    _drop_content(walk, owner.env.get(name), value, target, name)
    owner.env[name] = value
    walk.write((owner.uid, name), target, how, value, name)


def _assign_member(
    walk: Walk, base: Value, name: object, target: ast.expr, value: Value, how: str
) -> None:
    before = base.attrs.get(name)
    walk.bases[base.uid] = base
    # Of an object that is known, more is known than of a value that is not.
    is_news = value.kind not in ("const", "unknown") or before is None
    if is_news or not before or before.kind in ("const", "unknown"):
        _drop_content(walk, before, value, target, str(name))
        base.attrs[name] = value
    text = written(target)
    walk.write((base.uid, name), target, how, value, text)
    if base.kind != "class" and isinstance(target, ast.Subscript) and name != "[]":
        walk.write((base.uid, "[]"), target, "weak", value, text)


def _drop_content(
    walk: Walk, before: Value | None, value: Value, target: ast.expr, name: str
) -> None:
    """Note that a name no longer leads to what its old container held."""
    if before is None or not before.is_container:
        return
    if value is not before and value.kind == before.kind:
        walk.write((before.uid, "[]"), target, "drop", None, name)


def _unpack(walk: Walk, target: ast.Tuple | ast.List, value: Value, how: str) -> None:
    parts = value.elements
    is_starred = any(isinstance(each, ast.Starred) for each in target.elts)
    if is_starred or len(parts) != len(target.elts):
        is_same = value.kind in ("param", "param_groups")
        parts = [
            element_of(value) if is_same else unknown(taints=value.taints)
            for _ in target.elts
        ]
    for each, part in zip(target.elts, parts, strict=True):
        walk.assign(each, part, how=how)


# Statements.


def _run_assign(walk: Walk, node: ast.Assign | ast.AnnAssign) -> None:
    if node.value is None:
        return
    targets: list[ast.expr]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    walk.step(node)
    with walk.into(_sink_of(walk, targets)):
        value = walk.evaluate(node.value)
    if isinstance(node.value, ast.Call | ast.BinOp):
        for each in (value, *value.elements):
            if each.kind == "unknown":
                each.node, each.made_at = each.node or node.value, walk.current.number
                each.in_epoch = walk.epoch is not None
                walk.write((each.uid, "[]"), node, "set", each, "")
    for target in targets:
        walk.assign(target, value, how=_how(walk, target, node.value))
        for leaf in _leaves(target):
            # Keeping the larger or the smaller is no update.
            is_set = _is_bounding(node.value)
            how = "set" if is_set else _how(walk, leaf, node.value)
            _note_change(walk, leaf, node, how, value.taints)


def _how(walk: Walk, target: ast.expr, value: ast.expr) -> str:
    """Return `update` where the new value is made from the old one."""
    if isinstance(value, ast.Constant | ast.Name):
        return "set"
    how = walk.ways.get((target, value))
    if how is None:
        text = written(target)
        same = (each for each in ast.walk(value) if type(each) is type(target))
        is_own = any(written(each) == text for each in same)
        how = walk.ways[target, value] = "update" if is_own else "set"
    return how


def _sink_of(walk: Walk, targets: list[ast.expr]) -> Sink:
    """Return where an assigned value goes, so that its use can be followed."""
    leaves = [leaf for target in targets for leaf in _leaves(target)]
    sinks = [_sink_of_leaf(walk, leaf) for leaf in leaves]
    if SAVE in sinks or sinks == [OPTIMIZER]:
        return SAVE if SAVE in sinks else OPTIMIZER
    return Sink("flow", tuple(place for sink in sinks for place in sink.places))


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    """Yield the names, attributes and items that a target binds."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _leaves(each)
    elif isinstance(target, ast.Starred):
        yield from _leaves(target.value)
    else:
        yield target


def _sink_of_leaf(walk: Walk, target: ast.expr) -> Sink:
    """Return where a value goes that is assigned to a name, attribute or item."""
    if isinstance(target, ast.Name):
        return flow_to((walk.frame.binder(target.id).uid, target.id))
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return Sink("flow")
    base = _quietly(walk, target.value)
    if base.is_durable and base.kind != "model":
        return SAVE
    if base.kind in ("group", "optimizer", "param_groups", "param", "model"):
        return OPTIMIZER
    if isinstance(target, ast.Attribute):
        return flow_to((base.uid, target.attr))
    return flow_to((base.uid, "[]"))


def _run_aug_assign(walk: Walk, node: ast.AugAssign) -> None:
    walk.step(node)
    with walk.into(OWN):
        old = walk.evaluate(node.target)
    is_kept = old.kind == "accumulator"  # It stays the same object.
    with walk.into(SAVE if is_kept else _sink_of(walk, [node.target])):
        value = walk.evaluate(node.value)
    if is_kept:
        walk.note(node, "added", old, taints=value.taints)
        return
    if old.kind in ("list", "set") and isinstance(node.op, ast.Add | ast.BitOr):
        grow(walk, old, node, written(node.target), value)
        old.is_complete = False
        return
    taints = old.taints | value.taints
    new = unknown(taints)
    walk.assign(node.target, new, how="update")
    _note_change(walk, node.target, node, "update", value.taints)


def _note_change(
    walk: Walk, target: ast.expr, node: ast.stmt, how: str, taints: frozenset[str]
) -> None:
    """Note a change of something durable, or of an optimizer's settings."""
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return
    base, text = _quietly(walk, target.value), written(target)
    field = target.attr if isinstance(target, ast.Attribute) else ""
    if field and base.kind in ("param", "model") and field not in ("data", "grad"):
        walk.note(node, "set up", base, text=text)
    if field and base.kind == "param":
        if field == "data" and how == "update":
            walk.note(node, "trained", base.owner, role="weights")
        return
    # What a group of an optimizer's has is the optimizer's.
    owner = base.owner or base if base.kind == "group" else base
    if owner.kind == "accumulator":
        if "world_size" in taints:
            owner.taints -= {"accumulated"}  # a mean of all replicas
        walk.note(node, "added", owner, taints=taints)
    elif owner.is_durable and owner.kind != "model":
        walk.note(node, "changed", owner, how=how, text=text, taints=taints)


def _quietly(walk: Walk, node: ast.expr) -> Value:
    """Evaluate what a target belongs to, without noting its reads."""
    count = len(walk.current.reads)
    with walk.into(VALUE):
        value = walk.evaluate(node)
    del walk.current.reads[count:]
    return value


def _is_bounding(value: ast.expr) -> bool:
    """Return whether doing it twice gives what doing it once gives: max and min."""
    is_call = isinstance(value, ast.Call) and last_name(value.func) in _BOUNDING
    return is_call or isinstance(value, ast.IfExp)


STATEMENTS: Mapping[type[ast.stmt], RunStatement] = {
    ast.Assign: _run_assign,
    ast.AnnAssign: _run_assign,
    ast.AugAssign: _run_aug_assign,
}
