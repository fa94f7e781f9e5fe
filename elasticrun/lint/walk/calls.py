"""Calls: of the project's functions and classes, and of everything else."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from elasticrun.lint import naming
from elasticrun.lint.graph import CONTENT, OPTIMIZER, OWN, VALUE, Sink, flow_to
from elasticrun.lint.naming import GROWING, written
from elasticrun.lint.values import Class, Value, constant, register, unknown
from elasticrun.lint.walk.expressions import attribute
from elasticrun.lint.walk.externals import call_unknown, opaque
from elasticrun.lint.walk.functions import (
    Called,
    MethodCalled,
    arguments,
    call_function,
    called,
)
from elasticrun.lint.walk.losses import OF_CRITERIA, taints_of_loss
from elasticrun.lint.walk.methods import any_method
from elasticrun.lint.walk.table import ELASTIC, Row, function_row, method_row
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
    name, sink = function.attr, walk.sink
    if sink.kind == "none":  # The receiver is read, and often only to make it grow.
        sink = OWN if name in GROWING else VALUE
    with walk.into(sink):
        receiver = walk.evaluate(function.value)
    # What hangs under the name on the receiver may be of the project.
    callee = Value("bound", name)
    if not _changes_by_role(receiver, name):
        if receiver.kind in ("ext", "module", "instance", "class"):
            callee = attribute(walk, receiver, name, function)
        else:
            callee = receiver.attrs.get(name, callee)
    is_unseen = callee.kind == "unknown" and receiver.kind != "ext"
    if callee.kind not in ("bound", "param") and not is_unseen:
        return _call_value(walk, callee, node)
    value = _call_method(walk, receiver, name, node)
    value.taints |= callee.taints & OF_CRITERIA
    return value


def _call_value(walk: Walk, callee: Value, node: ast.Call) -> Value:
    """Return what calling a value returns."""
    if callee.kind == "func":
        return call_function(walk, callee, node)
    if callee.kind == "class":
        return _instantiate(walk, callee, node)
    if callee.kind == "ext":
        return _call_external(walk, callee.name, node)
    method = "forward" if _is_criterion(callee) else "__call__"
    if callee.defines(method):
        return call_function(walk, attribute(walk, callee, method, node), node)
    name = written(node.func) if callee.kind == "unknown" else callee.name
    return call_unknown(walk, callee, called(walk, name, node, _sink_in(callee)))


def _sink_in(callee: Value) -> Sink | None:
    """Return where the arguments of an unknown call go, if what is called tells."""
    return OPTIMIZER if callee.kind in ("model", "optimizer") else None


# What is not in the project.


def _call_external(walk: Walk, name: str, node: ast.Call) -> Value:
    """Return what an external call makes, noting its effects."""
    elastic = naming.elastic_name(name)
    if elastic:
        own = ELASTIC.get(elastic, Row())
        made = _by_row(walk, own, called(walk, elastic, node, own.sink or VALUE))
        assert made is not None
        return made
    row = function_row(name)
    it = called(walk, name, node, row.sink if row is not None else None)
    files = [each for each in it.values if each.kind == "file"]
    if files and row is not None and (row.event == "saved" or name == "print"):
        walk.note(node, "written", files[0])
    value = _by_row(walk, row, it)
    if value is None:
        value = opaque(walk, it)
        value.taints = taints_of_loss(it, value.taints)
    return value


def _call_method(walk: Walk, receiver: Value, name: str, node: ast.Call) -> Value:
    """Return what a method returns that the project does not define."""
    also = "model" if receiver.is_model else ""
    roles_of = (_role_of(receiver), also, "any")
    rows = (method_row(role, name) for role in roles_of)
    row = next((each for each in rows if each is not None), None)
    sink = row.sink if row is not None else _sink_in(receiver)
    sink = flow_to((receiver.uid, "[]")) if sink == CONTENT else sink
    given = arguments(walk, node, sink)
    it = MethodCalled(
        given.args, given.keywords, name=name, node=node, receiver=receiver
    )
    value = _by_row(walk, row, it)
    return any_method(walk, it) if value is None else value


def _role_of(value: Value) -> str:
    """Return what a value is to the table of methods."""
    if value.kind == "instance" and value.cls is not None and value.cls.role:
        return value.cls.role
    return value.kind


def _by_row(walk: Walk, row: Row | None, it: Called) -> Value | None:
    """Note what a row of the table says, and return what the call gives."""
    if row is None:
        return None
    if row.do is not None:
        return row.do(walk, it)
    receiver = it.receiver if isinstance(it, MethodCalled) else None
    if row.event is not None:
        walk.note(
            it.node, row.event, receiver, name=it.name, role=row.role,
            text=it.text, given=it, taints=it.taints, plain_loops=walk.plain_loops,
        )  # fmt: skip
    if row.gives == "nothing":
        return constant(None)
    if row.gives == "alike":
        return unknown(taints=it.taints | frozenset(row.taint.split()))
    if row.gives == "receiver":
        return receiver
    if row.gives == "first":
        return it.args[0] if it.args else None
    return unknown(frozenset(row.taint.split()))


# The project's classes.


def _instantiate(walk: Walk, callee: Value, node: ast.Call) -> Value:
    cls = callee.cls
    assert cls is not None
    if cls.role == "loader":
        return _call_external(walk, "elasticrun.AdaptiveDataLoader", node)
    made = walk.made(Value("instance", cls.node.name, node=node, cls=cls))
    constructor = cls.find("__init__")
    if constructor is not None:
        method = attribute(walk, made, "__init__", node)
        call_function(walk, method, node)
    else:
        _fill_fields(walk, made, cls, node)
    if cls.role == "state":
        walk.note(node, "state", made, name=cls.node.name)
        made.registered = True
        _keep_saved(walk, made, cls)
    elif cls.role in ("scheduler", "optimizer", "ema", "scaler"):
        walk.note(node, "made", made, role=cls.role)
    return made


def _keep_saved(walk: Walk, state: Value, cls: Class) -> None:
    """Note what a state's `save` reads of the objects that the state has."""
    found = cls.find("save")
    if found is None:
        return
    nodes = [each for each in ast.walk(found[1]) if isinstance(each, ast.Attribute)]
    own = {each.arg for each in found[1].args.args[:1]}

    def held(node: ast.expr) -> Value | None:
        if isinstance(node, ast.Attribute):
            base = held(node.value)
            return base.attrs.get(node.attr) if base is not None else None
        return state if isinstance(node, ast.Name) and node.id in own else None

    in_part = set()  # These are read for one of their fields.
    for node in nodes:  # from the outer ones to those in them
        base, value = held(node.value), held(node)
        is_field = base is not None and base.cls is not None and node.attr != "__dict__"
        if base is None or not is_field or base.defines(node.attr):
            continue
        walk.saved.add((base.uid, node.attr))
        in_part.add(node.value)
        if value is not None and node not in in_part:
            register(value)


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
    values = dict(zip(fields, given.args, strict=False)) | given.keywords
    for name in dict.fromkeys((*fields, *values)):
        if name in values:
            made.attrs[name] = values[name]
        elif any(name in each.constants for each in cls.lineage()):
            attribute(walk, made, name, node)
        if name in made.attrs:
            walk.write((made.uid, name), node, "set", made.attrs[name], name)
    if not fields:
        made.parts = given.values


def _is_criterion(value: Value) -> bool:
    """Return whether a value is a loss that the project defines, whose body counts."""
    cls = value.cls if value.kind == "instance" and value.is_model else None
    return cls is not None and _CRITERION.search(cls.node.name) is not None


def _changes_by_role(receiver: Value, name: str) -> bool:
    """Return whether the role of its class says what a method does, not its body."""
    cls = receiver.cls
    if receiver.kind != "instance" or cls is None or cls.role not in _STEPPING:
        return False
    return name in ("step", "update", "update_parameters", "load_state_dict")


EXPRESSIONS: Mapping[type[ast.expr], Evaluate] = {ast.Call: _evaluate_call}
