"""Methods of objects that are known: what they change, write, draw or send."""

from __future__ import annotations

import ast
import re

from elasticrun.lint.naming import GROWING, named, written
from elasticrun.lint.values import (
    OF_CONTENT,
    Arguments,
    Value,
    constant,
    taints_of,
    unknown,
)
from elasticrun.lint.walk import externals
from elasticrun.lint.walk.functions import MethodCalled, call_function
from elasticrun.lint.walk.losses import NUMBER, SELECTED, taints_of_method
from elasticrun.lint.walk.walk import Walk

_HARMLESS_IN_PLACE = named(
    "requires_grad_ detach_ zero_grad retain_grad share_memory_ register_"
)
_SENDERS = named(
    "client session requests producer smtp server bot webhook slack notifier api sqs "
    "sns"
)


# Containers and loaders.


def clear(walk: Walk, it: MethodCalled) -> Value:
    """Empty a container."""
    walk.write((it.receiver.uid, "[]"), it.node, "set", None, it.text)
    return constant(None)


def change(walk: Walk, it: MethodCalled) -> Value:
    """Add to a container, or to what only the method tells to be one; or change it."""
    receiver, is_growing = it.receiver, it.name in GROWING
    if not (receiver.is_container or (is_growing and receiver.kind == "unknown")):
        return unknown(taints=receiver.taints)
    if not is_growing:
        how = "grow" if receiver.kind == "set" else "weak"
        externals.write_content(walk, receiver, it.node, how, it.text, receiver)
        receiver.taints |= it.taints & OF_CONTENT
        return unknown(taints=receiver.taints)
    externals.grow(
        walk, receiver, it.node, it.text, it.args[-1] if it.args else unknown()
    )
    is_early = walk.loop is None and walk.epoch is None
    new = it.args
    if it.name == "extend":
        new = [part for each in new for part in each.elements]
    receiver.parts += new if is_early and it.name in ("append", "extend") else []
    receiver.is_complete &= is_early
    return unknown(taints=receiver.taints)


def items(_: Walk, it: MethodCalled) -> Value:
    """Return the items of a dictionary, its keys or its values."""
    known = it.receiver.attrs.items()
    pairs = [(constant(key), value) for key, value in known]
    others = (each for each in it.receiver.parts if each.kind != "ext")  # a factory
    pairs += [(unknown(), value) for value in others]
    if it.name == "items":
        parts = [Value("tuple", parts=[*pair]) for pair in pairs]
    else:
        parts = [pair[it.name == "values"] for pair in pairs]
    taints = it.receiver.taints | taints_of(value for _, value in pairs)
    is_complete = it.receiver.is_complete and bool(known)
    return Value("list", parts=parts, taints=taints, is_complete=is_complete)


# Random numbers.


def seed(walk: Walk, it: MethodCalled) -> Value:
    """Give a generator its seed."""
    walk.note(it.node, "seeded", it.receiver)
    it.receiver.parts = it.args
    return it.receiver


def reset(walk: Walk, it: MethodCalled) -> Value:
    """Begin an episode of an environment anew, which may give it a seed."""
    given = [v for k, v in it.keywords.items() if k == "seed" and not v.is_none]
    if not given:
        return draw(walk, it)
    walk.note(it.node, "seeded", it.receiver)
    return unknown(taints=taints_of(given) | {"batch"})


def draw(walk: Walk, it: MethodCalled) -> Value:
    """Return what a generator draws."""
    seeds = it.receiver.parts
    walk.note(it.node, "drawn", it.receiver, name=it.name, is_seeded=bool(seeds))
    if it.receiver.name.startswith("gym"):
        return unknown(taints=frozenset(("batch",)))  # Each replica has its own.
    if seeds and walk.epoch is None:
        return unknown(taints=taints_of(seeds))
    return unknown(taints=frozenset(("random",)))


# What is trained, and what trains it.


def step(walk: Walk, it: MethodCalled) -> Value:
    """Note a step of an optimizer, or of one that a scaler is given; walk closures."""
    is_scaled = it.receiver.kind == "scaler" and bool(it.args)
    stepped = it.args[0] if is_scaled else it.receiver
    walk.note(
        it.node, "trained", stepped, role="optimizer", plain_loops=walk.plain_loops
    )
    for closure in it.values:
        if closure.kind == "func":
            return call_function(walk, closure, it.node, Arguments())
    return constant(None)


def load(walk: Walk, it: MethodCalled) -> Value:
    """Mark what `load_state_dict` fills: the program cares for its state itself."""
    # From another model there is nothing to load after a restart.
    is_copied = any(each.kind == "param" for each in it.args)
    for each in (it.receiver, *it.receiver.parts, *it.receiver.also):
        each.is_loaded_by_hand |= not is_copied
    how = "copied" if is_copied else ""
    walk.note(it.node, "trained", it.receiver, role="loaded", how=how)
    return constant(None)


def parameters(_: Walk, it: MethodCalled) -> Value:
    """Return parameters of a model."""
    return Value("param", it.name, owner=it.receiver)


def change_parameters(walk: Walk, it: MethodCalled) -> Value:
    """Note what changes parameters in place."""
    model = it.receiver.owner or it.receiver
    is_in_place = it.name.endswith("_") and not it.name.startswith("_")
    is_in_place |= it.name in ("apply", "reset_parameters")
    if is_in_place and it.name not in _HARMLESS_IN_PLACE:
        walk.note(it.node, "trained", model, role="weights")
    return it.receiver


def topk(_: Walk, it: MethodCalled) -> Value:
    """Return the largest ones: of a batch some, if it decides how many."""
    is_share = any("batch" in each.taints for each in it.args[:1])
    return unknown(taints=it.receiver.taints | ({SELECTED} if is_share else set()))


def add_up(_: Walk, it: MethodCalled) -> Value:
    """Return a sum: of a batch a number, if the samples are added up."""
    by_name = [v for k, v in it.keywords.items() if k in ("dim", "axis")]
    dims = next(iter([*it.args, *by_name]), constant(0))
    over = [each.constant for each in (dims, *dims.parts)]
    taints = it.receiver.taints
    is_number = 0 in over and "batch" in taints
    return unknown(taints=taints | {NUMBER} if is_number else taints)


# Anything.


def save(walk: Walk, it: MethodCalled) -> Value:
    """Write or append a file: one that is given, or that the method is called on."""
    receiver = it.receiver
    mode = it.keywords.get("mode", constant("w")).constant
    walk.note(it.node, "written" if mode == "a" else "saved", name=it.name)
    if it.name != "to_csv":
        file = Value("file", receiver.name, node=it.node, mode="w")
        path = Arguments([receiver])
        walk.note(it.node, "opened", file, given=path, text=it.text, how="w")
    return unknown(taints=receiver.taints)


def any_method(walk: Walk, it: MethodCalled) -> Value:
    """Return what a method returns of which nothing but its name is known."""
    value = externals.call_unknown(walk, it.receiver, it)
    if value.kind != "wrapped":
        value.taints = taints_of_method(it, it.receiver.taints | value.taints)
    match it.node.func:
        case ast.Attribute(ast.Attribute(ast.Name("self")) as field, name):
            if re.fullmatch("[a-z]+_", name) and name not in _HARMLESS_IN_PLACE:
                _change_in_place(walk, it, field)
    return value


def _change_in_place(walk: Walk, it: MethodCalled, field: ast.Attribute) -> None:
    """Note that a tensor changes, which an object of the program holds."""
    is_new = it.name in ("zero_", "fill_")
    if is_new:  # What it held is not read.
        reads = walk.current.reads
        reads[:] = [each for each in reads if each.at is not field]
    changed = unknown(it.receiver.taints | it.taints)
    walk.assign(field, changed, how="set" if is_new else "update")


def gather(_: Walk, it: MethodCalled) -> Value:
    """Return what all replicas have together."""
    return unknown(taints=it.taints - externals.OF_ONE_REPLICA)


def send(walk: Walk, it: MethodCalled) -> None:
    """Note a request or message, if what sends it has a name of such."""
    text = written(it.node.func).lower()
    if any(each in text for each in _SENDERS):
        walk.note(it.node, "sent", name=it.name)


def execute(walk: Walk, it: MethodCalled) -> None:
    """Note what a data base is told to change."""
    command = written(it.node.args[0]) if it.args else ""
    if re.search(r"\b(?:INSERT|UPDATE|DELETE)\s", command, re.IGNORECASE):
        walk.note(it.node, "sent", name="SQL")


def move(walk: Walk, it: MethodCalled) -> None:
    """Note that a path is moved, removed or made; a text is replaced, too."""
    is_path = "path" in it.receiver.taints
    may_be_text = it.name in ("rename", "replace")
    if may_be_text and not (is_path and len(it.args) == 1 and not it.keywords):
        return
    if it.receiver.kind == "unknown":
        given = Arguments([it.receiver])
        name = f"Path.{it.name}"
        walk.note(
            it.node, "moved", name=name, given=given, plain_loops=walk.plain_loops
        )


def open_path(walk: Walk, it: MethodCalled) -> Value | None:
    """Return an open file of a path that the method is called on, or is given."""
    if it.receiver.kind not in ("unknown", "ext"):
        return None
    mode = it.args[0].constant if it.args else "r"
    if isinstance(mode, str) and not set(mode) <= set("rwaxbt+"):
        return externals.open_named(walk, it)
    return externals.open_file(walk, it, it.receiver, it.args, it.text)
