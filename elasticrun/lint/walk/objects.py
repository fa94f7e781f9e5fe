"""Objects that calls make: models, optimizers, files, copies; methods of containers."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.values import Arguments, Value, constant, key_of, unknown
from elasticrun.lint.walk.arguments import Called, Handle, MethodCall
from elasticrun.lint.walk.attributes import item
from elasticrun.lint.walk.walk import Walk

CHANGING = catalog.GROWING | {"add", "update", "setdefault", "pop", "popleft"}
_COPIERS = frozenset(("copy.copy", "copy.deepcopy"))
_OPENERS = frozenset(("open", "io.open", "gzip.open", "bz2.open", "codecs.open"))


def object_made(walk: Walk, it: Called) -> Value | None:
    """Return the object that a call makes; None if none is known."""
    if it.name in _OPENERS:
        path, *rest = it.args or [unknown()]
        return open_file(walk, it.node, Arguments(rest, it.keywords), path)
    if it.name in _COPIERS and it.args:
        return _copied(walk, it.args[0], it.node)
    if roles.is_model_wrapper(it.name):
        models = [each for each in it.args if looks_like_model(each)]
        return _wrapped_model(walk, models[0], it.node) if models else None
    kind = roles.made_by(it.name)
    if kind is None:
        return None
    value = walk.made(Value(kind, it.name, node=it.node, parts=it.values))
    walk.note(it.node, "made", value, role=kind, name=it.name, given=it)
    return value


def _wrapped_model(walk: Walk, inner: Value, node: ast.Call) -> Value:
    is_saved = inner.registered
    value = Value("model", inner.name, node=node, parts=[inner], registered=is_saved)
    return walk.made(value)


def _copied(walk: Walk, original: Value, node: ast.Call) -> Value:
    copied = Value(
        original.kind,
        original.name,
        parts=original.parts,
        attrs=original.attrs,
        node=node,
        cls=original.cls,
        constant=original.constant,
        mode=original.mode,
        is_empty=original.is_empty,
    )
    return walk.made(copied) if original.is_object else copied


def open_file(walk: Walk, node: ast.Call, rest: Arguments, path: Value) -> Value:
    """Return an open file, noting its path, and its mode from the other arguments."""
    given = rest.keywords.get("mode") or (rest.args[0] if rest.args else constant("r"))
    mode = key_of(given)
    mode = mode if isinstance(mode, str) else "?"
    value = walk.made(Value("file", path.name, node=node, mode=mode))
    text, paths = _path_text(node), Arguments([path])
    walk.note(node, "opened", value, given=paths, text=text, how=mode)
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


def looks_like_model(value: Value) -> bool:
    """Return whether a value is a model, or named like one."""
    is_hinted = value.kind == "unknown" and roles.hint(value.name) == "model"
    return value.is_model or is_hinted


# Containers.


def _container_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name == "clear":
        walk.write((it.receiver.uid, "[]"), it.node, "set", None, it.text)
        return constant(None)
    if it.name not in CHANGING:
        return _read_container(walk, it)
    args = it.arguments(walk, flow_to((it.receiver.uid, "[]"))).args
    how = "grow" if it.name in catalog.GROWING or it.receiver.kind == "set" else "weak"
    is_time = bool(args) and args[-1].taints == frozenset(("time",))
    content = args[-1] if is_time else None
    write_content(walk, it.receiver, it.node, how, it.text, content)
    if it.name in catalog.GROWING:
        walk.note(it.node, "changed", it.receiver, how="grow", name="[]", text=it.text)
        if walk.loop is None and walk.epoch is None and it.name == "append":
            it.receiver.parts += args
        it.receiver.is_complete &= walk.epoch is None and walk.loop is None
    return unknown(taints=it.receiver.taints)


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


def _read_container(walk: Walk, it: MethodCall) -> Value | None:
    if it.receiver.kind != "dict" or it.name not in ("items", "values", "keys", "get"):
        return None
    args = it.arguments(walk).args
    if it.name == "get":
        return item(walk, it.receiver, args[0], it.node) if args else None
    made = Value("list", taints=it.receiver.taints)
    made.is_complete = it.receiver.is_complete and bool(it.receiver.attrs)
    pairs = [[constant(k), v] for k, v in it.receiver.attrs.items()]
    if it.name == "items":
        made.parts = [Value("tuple", parts=pair) for pair in pairs]
    else:
        made.parts = [pair[it.name == "values"] for pair in pairs]
    return made


METHODS: Mapping[str, Handle] = {
    "list": _container_method,
    "dict": _container_method,
    "set": _container_method,
}
