"""Objects that calls make: models, optimizers, files, copies, containers."""

from __future__ import annotations

import ast
from dataclasses import replace

from elasticrun.lint import roles
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    Arguments,
    Kind,
    Value,
    constant,
    key_of,
    next_uid,
    unknown,
)
from elasticrun.lint.walk.arguments import Called
from elasticrun.lint.walk.walk import Walk

_KINDS: dict[str, Kind] = {
    "list": "list",
    "dict": "dict",
    "set": "set",
    "tuple": "tuple",
    "deque": "list",
    "defaultdict": "dict",
    "OrderedDict": "dict",
    "Counter": "dict",
    "vars": "dict",
}


def make(walk: Walk, it: Called) -> Value:
    """Return the object that a call makes of a kind that its name tells."""
    kind = roles.made_by(it.name)
    assert kind is not None
    value = walk.made(Value(kind, it.name, node=it.node, parts=it.values))
    walk.note(it.node, "made", value, role=kind, name=it.name, given=it)
    return value


def wrap_model(walk: Walk, it: Called) -> Value | None:
    """Return the model that wraps the one that a call is given, if it is given one."""
    inner = next((each for each in it.args if looks_like_model(each)), None)
    if inner is None:
        return None
    made = Value("model", inner.name, node=it.node, parts=[inner])
    made.registered = inner.registered
    return walk.made(made)


def copy(walk: Walk, it: Called) -> Value | None:
    """Return a copy of a value, which no state has."""
    if not it.args:
        return None
    original = it.args[0]
    made = replace(
        original,
        node=it.node,
        owner=None,
        also=[],
        registered=False,
        uid=next_uid(),
    )
    return walk.made(made) if original.is_object else made


def looks_like_model(value: Value) -> bool:
    """Return whether a value is a model, or named like one."""
    is_hinted = value.kind == "unknown" and roles.hint(value.name) == "model"
    return value.is_model or is_hinted


# Files.


def open_named(walk: Walk, it: Called) -> Value:
    """Return an open file, whose path is the first argument."""
    return open_file(walk, it, (it.args or [unknown()])[0])


def open_file(walk: Walk, it: Called, path: Value) -> Value:
    """Return an open file, noting its path, and its mode from the other arguments."""
    rest = it.args[1:] if path in it.args else it.args
    given = it.keywords.get("mode") or (rest[0] if rest else constant("r"))
    mode = key_of(given)
    mode = mode if isinstance(mode, str) else "?"
    value = walk.made(Value("file", path.name, node=it.node, mode=mode))
    paths = Arguments([path])
    text = _path_text(it.node)
    walk.note(it.node, "opened", value, given=paths, text=text, how=mode)
    return value


def _path_text(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and not _names_a_file(node):
        return written(function.value)
    return written(node.args[0]) if node.args else ""


def _names_a_file(node: ast.Call) -> bool:
    """Return whether `x.open(...)` is given a path, not only a mode for `x` itself."""
    first = node.args[0] if node.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return not set(first.value) <= set("rwaxbt+U")
    return first is not None


# Containers.


def make_container(walk: Walk, it: Called) -> Value | None:
    """Return a new container, or a record with the attributes that it is given."""
    if it.last == "field":
        factory = it.keywords.get("default_factory")
        kind = _KINDS.get(factory.name, "opaque") if factory is not None else None
        return walk.made(Value(kind, node=it.node)) if kind is not None else None
    kind = _KINDS.get(it.last, "instance")
    if it.last in ("deque", "defaultdict", "OrderedDict", "Counter"):
        return walk.made(Value(kind, node=it.node, is_complete=False))
    if not it.values and it.last != "vars" and kind != "instance":
        return walk.made(Value(kind, node=it.node, is_empty=True))
    if it.args:
        return None
    return walk.made(Value(kind, node=it.node, attrs=it.keywords))


def write_content(
    walk: Walk,
    value: Value,
    node: ast.AST,
    how: str,
    text: str,
    content: Value | None = None,
) -> None:
    """Note a change of what a container holds, and so of what holds it."""
    walk.write((value.uid, "[]"), node, how, content or value, text)
    owner, depth = value.owner, 0
    while owner is not None and depth < 4:
        walk.bases[owner.uid] = owner
        value.registered |= owner.is_durable
        walk.write((owner.uid, "[]"), node, how, owner, text)
        owner, depth = owner.owner, depth + 1
