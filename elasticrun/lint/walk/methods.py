"""Methods of objects that are known: what they change, write, draw or send."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import LOG, SAVE, TRACK, Sink, flow_to
from elasticrun.lint.naming import named, written
from elasticrun.lint.values import Arguments, Value, constant, taints_of, unknown
from elasticrun.lint.walk import objects, trained
from elasticrun.lint.walk.arguments import Handle, MethodCall
from elasticrun.lint.walk.effects import is_seeded
from elasticrun.lint.walk.externals import call_unknown
from elasticrun.lint.walk.language import iterator
from elasticrun.lint.walk.losses import taints_of_method
from elasticrun.lint.walk.objects import (
    CHANGING,
    looks_like_model,
    open_file,
    write_content,
)
from elasticrun.lint.walk.trained import loaded, model_method
from elasticrun.lint.walk.walk import Walk

_TENSOR_DRAWS = named(
    "uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_"
)
_FILE_WRITES = frozenset(
    ("write", "writelines", "writerow", "writerows", "writeheader")
)
_PATH_CHANGES = frozenset(("rename", "replace", "unlink", "rmdir", "mkdir"))
_ONLY_OF_PATHS = frozenset(("mkdir", "rmdir", "unlink"))  # a text has the others too
_SENDING = frozenset(("post", "put", "patch", "sendmail", "send_message", "publish"))
_SENDERS = ("client", "session", "requests", "producer", "smtp", "server", "bot",
            "webhook", "slack", "notifier", "api", "sqs", "sns")  # fmt: skip


def call_method(walk: Walk, it: MethodCall) -> Value:
    """Return what a method returns, noting its effects."""
    handle = _METHODS.get(_role_of(it.receiver))
    value = handle(walk, it) if handle is not None else None
    return _any_method(walk, it) if value is None else value


def _role_of(value: Value) -> str:
    """Return what a value is, or what its name suggests where nothing is known."""
    if value.kind == "instance" and value.cls is not None and value.cls.role:
        return value.cls.role
    if value.kind != "unknown":
        return value.kind
    return roles.hint(value.name) if value.name else "unknown"


# Files, trackers, generators.


def _file_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name not in _FILE_WRITES:
        return None
    it.arguments(walk, SAVE)
    walk.note(it.node, "written", it.receiver)
    return constant(None)


def _tracker_method(walk: Walk, it: MethodCall) -> Value | None:
    it.arguments(walk, TRACK)
    if it.name in catalog.TRACKER_METHODS or it.name in catalog.LOG_METHODS:
        walk.note(it.node, "logged", it.receiver)
    return it.receiver if it.name == "__enter__" else unknown()


def _rng_method(walk: Walk, it: MethodCall) -> Value | None:
    args = it.arguments(walk).args
    if it.name in ("manual_seed", "seed"):
        walk.note(it.node, "seeded", it.receiver, name=it.name, given=Arguments(args))
        it.receiver.parts = args
        return it.receiver
    if it.name in catalog.RNG_METHODS:
        has_seed = bool(it.receiver.parts)
        walk.note(it.node, "drawn", it.receiver, name=it.name, is_seeded=has_seed)
        if it.receiver.parts and walk.epoch is None:
            return unknown(taints=taints_of(it.receiver.parts))
        return unknown(taints=frozenset(("random",)))
    return None


def _accumulator_method(walk: Walk, it: MethodCall) -> Value | None:
    it.arguments(walk)
    if it.name == "synchronized":
        walk.note(it.node, "collective", name="synchronized")
        return it.receiver
    return unknown()


def _loader_method(walk: Walk, it: MethodCall) -> Value | None:
    it.arguments(walk)
    if it.name == "enumerate":
        pair = [unknown("batch_index"), it.receiver]
        return Value("wrapped", "zip", parts=pair, node=it.node)
    if it.name == "batches":
        return Value("wrapped", "batches", parts=[it.receiver], node=it.node)
    if it.name == "__iter__":
        return iterator(walk, "iter", it.node, it.receiver)
    return unknown()


_METHODS: Mapping[str, Handle] = {
    "file": _file_method,
    "tracker": _tracker_method,
    "rng": _rng_method,
    "accumulator": _accumulator_method,
    "loader": _loader_method,
    **objects.METHODS,
    **trained.METHODS,
}


# Anything.


def _any_method(walk: Walk, it: MethodCall) -> Value:
    """Return what a method returns of which little but its name is known."""
    receiver, name = it.receiver, it.name
    if looks_like_model(receiver) and name not in ("step", "update", "fit"):
        found = model_method(walk, it)
        if found is not None:
            return found
    if name == "load_state_dict":
        return loaded(walk, it)
    if name in ("parameters", "named_parameters") and not it.node.args:
        return Value("param", name, sure=False, owner=receiver)
    if name == "open" and receiver.kind in ("unknown", "ext"):
        return open_file(walk, it.node, it.arguments(walk), receiver)
    _note_any(walk, it)
    sink = _sink_of(receiver, name, walk.sink)
    if sink is not None:
        it.arguments(walk, sink)
        if name in catalog.GROWING and receiver.kind == "unknown":
            write_content(walk, receiver, it.node, "grow", it.text)
            walk.note(it.node, "changed", receiver, how="grow", name="[]", text=it.text)
        return unknown(taints=receiver.taints)
    result = call_unknown(walk, receiver, name, it.node)
    if result.kind == "wrapped":
        return result
    taints = receiver.taints | result.taints
    if name == "backward":
        walk.note(it.node, "backward", taints=taints)
    taints = taints_of_method(it.node, name, taints)
    return unknown(taints=_taints_of_path(name, taints))


def _note_any(walk: Walk, it: MethodCall) -> None:
    """Note what a method does, by its name and what it is called on."""
    receiver, name, node = it.receiver, it.name, it.node
    if name in catalog.LOG_METHODS:
        walk.note(node, "logged", receiver)
    elif name in catalog.SAVE_METHODS or name in _FILE_WRITES:
        _note_written(walk, it)
    elif name in _PATH_CHANGES:
        _note_moved(walk, it)
    elif name in _TENSOR_DRAWS:
        if not any(each.arg == "generator" for each in node.keywords):
            walk.note(node, "drawn", name=name, is_seeded=is_seeded(walk, "torch"))
    else:
        _note_sent(walk, it)


def _note_moved(walk: Walk, it: MethodCall) -> None:
    is_sure = _looks_like_path(it.node)
    if is_sure or _may_be_path(it.receiver, it.name, it.node):
        is_sure |= "path" in it.receiver.taints
        path, name = None if is_sure else it.receiver, f"Path.{it.name}"
        walk.note(it.node, "moved", path, name=name, catching=walk.catching)


def _note_written(walk: Walk, it: MethodCall) -> None:
    receiver, name, node = it.receiver, it.name, it.node
    if name == "to_csv" and _appends(node):
        walk.note(node, "written")
    elif name in catalog.SAVE_METHODS:
        walk.note(node, "saved", name=name)
        if name in ("write_text", "write_bytes"):
            file = Value("file", receiver.name, node=node, mode="w")
            path = Arguments([receiver])
            walk.note(node, "opened", file, given=path, text=it.text, how="w")
    elif receiver.kind == "unknown":
        walk.note(node, "written", receiver)


def _note_sent(walk: Walk, it: MethodCall) -> None:
    text = written(it.node.func).lower()
    if it.name in _SENDING and any(each in text for each in _SENDERS):
        walk.note(it.node, "sent", name=it.name)
    elif it.name in ("execute", "executemany") and _is_insert(it.node):
        walk.note(it.node, "sent", name="SQL")


def _sink_of(receiver: Value, name: str, sink: Sink) -> Sink | None:
    """Return where the arguments of a method go that keeps them, or shows them."""
    if name in catalog.LOG_METHODS:
        return TRACK if name in catalog.TRACKER_METHODS else LOG
    if name in catalog.SAVE_METHODS:
        return SAVE
    if name not in CHANGING:
        return None
    return flow_to((receiver.uid, "[]")) if receiver.kind == "unknown" else sink


def _looks_like_path(node: ast.Call) -> bool:
    text = written(node.func).lower()
    owner = text.rpartition(".")[0]
    words = ("path", "file", "dir", "folder", "ckpt", "checkpoint", "lock", "marker")
    is_path = any(word in owner for word in words)
    return is_path and not (text.endswith("replace") and len(node.args) != 1)


def _taints_of_path(name: str, taints: frozenset[str]) -> frozenset[str]:
    """Return what a method's result depends on, if it may be one of a path."""
    if name in ("exists", "is_file", "is_dir"):
        return taints | {"exists"}
    return taints - {"path"} if name in ("read_text", "read_bytes") else taints


def _may_be_path(receiver: Value, name: str, node: ast.Call) -> bool:
    if receiver.kind != "unknown":
        return False
    if name in _ONLY_OF_PATHS:
        return True
    return "path" in receiver.taints and len(node.args) == 1 and not node.keywords


def _appends(node: ast.Call) -> bool:
    return any(
        each.arg == "mode"
        and isinstance(each.value, ast.Constant)
        and str(each.value.value).startswith("a")
        for each in node.keywords
    )


def _is_insert(node: ast.Call) -> bool:
    if not node.args:
        return False
    text = written(node.args[0]).lstrip("fbr'\"( \\n").upper()
    return text.startswith(("INSERT", "UPDATE", "DELETE"))
