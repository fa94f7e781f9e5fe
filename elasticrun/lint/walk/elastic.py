"""Calls of elasticrun itself, and loops over its loaders that cannot be seen."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace

from elasticrun.lint import catalog
from elasticrun.lint.graph import SAVE, VALUE, DataLoop
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    NO_TAINTS,
    Kind,
    Value,
    constant,
    loaders_in,
    register,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.arguments import Called, arguments
from elasticrun.lint.walk.walk import Walk

# What depends on what elasticrun's own functions return.
_ELASTIC_TAINTS = {
    "rank": frozenset(("rank",)),
    "local_rank": frozenset(("rank",)),
    "replica_rank": frozenset(("rank",)),
    "world_size": frozenset(("world_size",)),
    "num_replicas": frozenset(("world_size",)),
    "generation": frozenset(("generation",)),
    "num_restarts": frozenset(("generation",)),
    "once": frozenset(("once",)),
    "current_epoch": frozenset(("epoch",)),
    "finished_epochs": frozenset(("epoch",)),
}


# Loops up to a total, by the kind of their value and the name of the total.
_BOUNDS: dict[str, tuple[Kind, str]] = {
    "remaining_epochs_until": ("epochs", "num_epochs"),
    "remaining_steps_until": ("steps", "num_steps"),
}


def call_elastic(walk: Walk, name: str, node: ast.Call) -> Value:
    """Return what one of elasticrun's own names makes or asks."""
    walk.note(node, "job")
    sink = SAVE if name == "Variables" else VALUE
    given = arguments(walk, node, sink)
    it = Called(given.args, given.keywords, name=name, node=node)
    if name in _MAKERS:
        return _MAKERS[name](walk, it)
    if name in _BOUNDS:
        kind, keyword = _BOUNDS[name]
        bound = it.args[:1] or [it.keywords.get(keyword, unknown())]
        return Value(kind, name, node=node, parts=bound)
    if name in catalog.ELASTIC_COLLECTIVES:
        walk.note(node, "collective", name=name)
        return unknown()
    return unknown(name, _ELASTIC_TAINTS.get(name, NO_TAINTS))


def _register(walk: Walk, it: Called) -> Value:
    for value in it.values:
        register(value)
        if value.kind == "instance":
            register_reachable(value)
    walk.note(it.node, "state", name="register")
    for keyword in it.node.keywords:
        if keyword.arg is None:
            value = walk.evaluate(keyword.value)
            if not value.attrs and not value.parts:
                # Not even how many things are registered here is known.
                walk.note(it.node, "unseen states")
    return constant(None)


def _make_loader(walk: Walk, it: Called) -> Value:
    value = walk.made(Value("loader", it.name, node=it.node))
    value.parts = it.values if it.name == "CombinedLoader" else it.args[:1]
    walk.note(it.node, "state", value, name=it.name)
    walk.note(it.node, "made", value, role="loader", name=it.name, given=it)
    return value


def _make_parallel(walk: Walk, it: Called) -> Value:
    value = walk.made(Value("model", "AdaptiveDataParallel", node=it.node))
    names = ("module", "model", "optimizer", "lr_scheduler")
    states = [*it.args, *(v for k, v in it.keywords.items() if k in names)]
    value.parts = [each for each in states if each.kind != "const"]
    for part in states:
        register(part)
    register(value)
    walk.note(it.node, "state", value, name="AdaptiveDataParallel")
    return value


def _prepare(walk: Walk, it: Called) -> Value:
    """Return what Accelerate's `prepare(accelerator, model, optimizer, ...)` does."""
    model, rest = _make_parallel(walk, replace(it, args=it.args[1:])), it.args[2:]
    return Value("tuple", parts=[model, *rest]) if rest else model


def _make_variables(walk: Walk, it: Called) -> Value:
    fields = {k: v for k, v in it.keywords.items() if k != "name"}
    value = walk.made(Value("variables", it.name, node=it.node, attrs=fields))
    for each in value.attrs.values():
        each.registered = each.is_container
    walk.note(it.node, "state", value, name=it.name)
    return value


def _make_accumulator(walk: Walk, it: Called) -> Value:
    walk.note(it.node, "state", name=it.name)
    return walk.made(Value("accumulator", it.name, node=it.node))


_MAKERS: Mapping[str, Callable[[Walk, Called], Value]] = {
    "AdaptiveDataLoader": _make_loader,
    "CombinedLoader": _make_loader,
    "AdaptiveDataParallel": _make_parallel,
    "prepare": _prepare,
    "register": _register,
    "Variables": _make_variables,
    "Accumulator": _make_accumulator,
}


# Loops that cannot be seen.


def assume_loop(walk: Walk, loader: Value, node: ast.AST) -> None:
    """Note a loop over a loader inside a function that is known to have one."""
    found = loaders_in(loader)
    if not found:
        return
    loop = DataLoop(
        walk.step(node),
        (),
        written(node)[:60],
        found[0],
        sure=found[0].sure,
        is_elastic=found[0].kind == "loader",
    )
    walk.graph.loops.append(loop)
    walk.step(walk.frame.statement)
