"""Calls: of the project's functions and classes, and of everything else."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from elasticrun.lint import catalog
from elasticrun.lint.graph import OWN, VALUE, Sink
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    Class,
    Value,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.arguments import MethodCall, arguments
from elasticrun.lint.walk.attributes import attribute
from elasticrun.lint.walk.externals import call_external, call_unknown
from elasticrun.lint.walk.functions import call_known
from elasticrun.lint.walk.losses import OF_CRITERIA
from elasticrun.lint.walk.methods import call_method
from elasticrun.lint.walk.walk import Evaluate, Walk

_STEPPING = frozenset(("scheduler", "ema", "optimizer"))
_CRITERION = re.compile(r"Loss|Criterion|Entropy")  # A module that is no model.


def _evaluate_call(walk: Walk, node: ast.Call) -> Value:
    """Return what a call returns, having walked through the function if known."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        with walk.into(VALUE):
            callee = walk.evaluate(function)
        return _call_value(walk, callee, node)
    with walk.into(_sink_of_receiver(walk, function.attr)):
        receiver = walk.evaluate(function.value)
    callee = _member_called(walk, receiver, function)
    is_unseen = callee.kind == "unknown" and receiver.kind != "ext"
    if callee.kind not in ("bound", "param") and not is_unseen:
        return _call_value(walk, callee, node)
    listed = _as_listed(walk, function.attr, node)
    if listed is not None:
        return listed
    value = call_method(walk, MethodCall(receiver, function.attr, node))
    value.taints |= callee.taints & OF_CRITERIA
    return value


def _sink_of_receiver(walk: Walk, name: str) -> Sink:
    """Return what a call reads its receiver for: often only to make it grow."""
    if walk.sink.kind != "none":
        return walk.sink
    return OWN if name in catalog.GROWING else VALUE


def _member_called(walk: Walk, receiver: Value, function: ast.Attribute) -> Value:
    """Return what hangs under a name on the receiver of a call."""
    if not _changes_by_role(receiver, function.attr):
        if receiver.kind in ("ext", "module", "instance", "class"):
            return attribute(walk, receiver, function.attr, function)
        if function.attr in receiver.attrs:
            return receiver.attrs[function.attr]
    return Value("bound", function.attr)


def _call_value(walk: Walk, callee: Value, node: ast.Call) -> Value:
    """Return what calling a value returns."""
    listed = _as_listed(walk, callee.name, node)
    if listed is not None:
        return listed
    if callee.kind == "func":
        return call_known(walk, callee, node)
    if callee.kind == "class":
        return _instantiate(walk, callee, node)
    if callee.kind == "ext":
        return call_external(walk, callee.name, node)
    if _is_criterion(callee):
        return call_known(walk, attribute(walk, callee, "forward", node), node)
    name = written(node.func) if callee.kind == "unknown" else callee.name
    return call_unknown(walk, callee, name, node)


def _as_listed(walk: Walk, name: str, node: ast.Call) -> Value | None:
    """Return what a call returns that the settings speak about; None otherwise."""
    options = walk.options
    if not options.idempotent and not options.non_idempotent:
        return None
    text = written(node.func)
    names = {name, name.rpartition(".")[2], text, text.rpartition(".")[2]}
    is_effect = not names.isdisjoint(options.non_idempotent)
    if not is_effect and names.isdisjoint(options.idempotent):
        return None
    given = arguments(walk, node)
    if is_effect:
        walk.note(node, "sent", name=text)
    return unknown(taints=given.taints)


# The project's classes.


def _instantiate(walk: Walk, callee: Value, node: ast.Call) -> Value:
    cls = callee.cls
    assert cls is not None
    if cls.role == "loader" or cls.node.name in walk.options.loaders:
        return call_external(walk, "elasticrun.AdaptiveDataLoader", node)
    made = walk.made(Value("instance", cls.node.name, node=node, cls=cls))
    constructor = cls.find("__init__")
    if constructor is not None:
        method = attribute(walk, made, "__init__", node)
        call_known(walk, method, node)
    else:
        _fill_fields(walk, made, cls, node)
    if cls.role == "state":
        walk.note(node, "state", made, name=cls.node.name)
        made.registered = True
        register_reachable(made)
    elif cls.role in ("scheduler", "optimizer", "ema", "scaler"):
        walk.note(node, "made", made, role=cls.role)
    return made


def _fill_fields(walk: Walk, made: Value, cls: Class, node: ast.Call) -> None:
    """Set the fields of a data class, or keep what an unseen constructor gets."""
    given = arguments(walk, node)
    fields = [
        statement.target.id
        for each in reversed(cls.lineage())
        for statement in each.node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
    ]
    made.attrs.update(zip(fields, given.args, strict=False))
    made.attrs.update(given.keywords)
    for name in made.attrs:
        walk.write((made.uid, name), node, "set", made.attrs[name], str(name))
    if not fields:
        made.parts = given.values


def _is_criterion(value: Value) -> bool:
    """Return whether a value is a loss that the project defines, whose body counts."""
    cls = value.cls
    is_module = value.kind == "instance" and cls is not None and cls.role == "model"
    if not is_module or cls is None or not _CRITERION.search(cls.node.name):
        return False
    return cls.find("forward") is not None


def _changes_by_role(receiver: Value, name: str) -> bool:
    """Return whether the role of its class says what a method does, not its body."""
    cls = receiver.cls
    if receiver.kind != "instance" or cls is None or cls.role not in _STEPPING:
        return False
    return name in ("step", "update", "update_parameters", "load_state_dict")


EXPRESSIONS: Mapping[type[ast.expr], Evaluate] = {ast.Call: _evaluate_call}
