"""Calls of the language's own functions and of its library."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.values import Kind, Value, unknown
from elasticrun.lint.walk.arguments import Called
from elasticrun.lint.walk.attributes import environment_taints
from elasticrun.lint.walk.walk import Walk

_CONTAINERS: dict[str, Kind] = {
    "list": "list",
    "dict": "dict",
    "set": "set",
    "tuple": "tuple",
}
_COLLECTIONS: dict[str, Kind] = {
    "deque": "list",
    "defaultdict": "dict",
    "OrderedDict": "dict",
    "Counter": "dict",
}
_RECORDS = frozenset(("SimpleNamespace", "Namespace", "AttrDict", "EasyDict", "Box"))
_SOURCES = (
    (catalog.TIME, "time"),
    (catalog.ENTROPY, "entropy"),
    (catalog.RANK, "rank"),
    (catalog.WORLD_SIZE, "world_size"),
    (catalog.EXISTENCE, "exists"),
)


def language(walk: Walk, it: Called) -> Value | None:
    """Return what a function of the language returns; None if it is none."""
    for names, taint in _SOURCES:
        if it.name in names:
            return unknown(taint, frozenset((taint,)))
    if it.name in catalog.ENVIRONMENT_READERS and it.args:
        return unknown("environ", environment_taints(it.args[0]))
    return _iterating(walk, it) or _container(walk, it) or _other(it)


def _other(it: Called) -> Value | None:
    if it.name.startswith("pathlib."):
        return unknown(taints=it.taints | {"path"})
    if it.last in ("ThreadPoolExecutor", "Thread"):
        return unknown()
    if it.name in ("csv.writer", "csv.DictWriter") and it.args:
        return it.args[0]
    return None


# Iteration.


def _iterating(walk: Walk, it: Called) -> Value | None:
    if it.name in ("zip", "itertools.zip_longest"):
        walk.note(it.node, "zipped", given=it)
    if it.name == "next" and it.args:
        walk.note(it.node, "asked", it.args[0], given=it, turns=walk.turns)
        return unknown(taints=it.taints)
    if it.last in ("iter", "cycle") and it.args:
        return iterator(walk, it.last, it.node, it.args[0])
    if it.last in catalog.WRAPPERS and it.values:
        return _wrapping(walk, it)
    if it.last in catalog.CONSUMING and "." not in it.name:
        return _consumed(walk, it) if it.args else None
    if it.name == "range":
        return Value("range", parts=it.args, taints=it.taints)
    return None


def iterator(walk: Walk, last: str, node: ast.Call, source: Value) -> Value:
    """Return an iterator over a value, noting that it is iterated by hand."""
    made_at = walk.current.number
    value = Value("iterator", last, parts=[source], node=node, made_at=made_at)
    walk.note(node, "iterated", source)
    return value


def _wrapping(walk: Walk, it: Called) -> Value:
    if it.last in ("list", "tuple", "sorted") and it.args:
        first = it.args[0]
        if first.kind in ("list", "tuple", "dict") and it.last != "sorted":
            copied = Value("list", parts=first.parts, is_complete=first.is_complete)
            return walk.made(copied)
        _consumed(walk, it)
        parameters = [first] if first.kind == "param" else []
        return walk.made(Value("list", parts=parameters, taints=it.taints))
    parts = it.args if it.last == "zip" else it.values
    return Value("wrapped", it.last, parts=parts, node=it.node, taints=it.taints)


def _consumed(walk: Walk, it: Called) -> Value:
    for value in it.args:
        if value.kind in ("loader", "wrapped", "generator"):
            walk.iterate(value, it.node, lambda _: None)
    return unknown(taints=it.taints)


# Containers.


def _container(walk: Walk, it: Called) -> Value | None:
    if it.last in _COLLECTIONS:
        kind = _COLLECTIONS[it.last]
        return walk.made(Value(kind, node=it.node, is_complete=False))
    if it.name == "dataclasses.field" and "default_factory" in it.keywords:
        factory = it.keywords["default_factory"].name
        return walk.made(Value(_CONTAINERS.get(factory, "opaque"), node=it.node))
    if it.name in _CONTAINERS and not it.values:
        return walk.made(Value(_CONTAINERS[it.name], node=it.node, is_empty=True))
    is_record = it.last in _RECORDS
    if (it.name in ("dict", "vars") or is_record) and not it.args:
        kind = "instance" if is_record else "dict"
        return walk.made(Value(kind, node=it.node, attrs=it.keywords))
    return None
