"""Calls of elasticrun itself."""

from __future__ import annotations

from dataclasses import replace

from elasticrun.lint.values import (
    Kind,
    Value,
    constant,
    register,
    unknown,
)
from elasticrun.lint.walk.arguments import Called
from elasticrun.lint.walk.walk import Walk


def register_all(walk: Walk, it: Called) -> Value:
    """Register what `register` is given."""
    for value in it.values:
        register(value)
    walk.note(it.node, "state", name="register", given=it)
    for keyword in it.node.keywords:
        if keyword.arg is None:
            value = walk.evaluate(keyword.value)
            if not value.attrs and not value.parts:
                # Not even how many things are registered here is known.
                walk.note(it.node, "unseen states")
    return constant(None)


def _state(walk: Walk, it: Called, kind: Kind) -> Value:
    value = walk.made(Value(kind, it.name, node=it.node))
    walk.note(it.node, "state", value, name=it.name, given=it)
    return value


def make_loader(walk: Walk, it: Called) -> Value:
    """Return an elastic loader."""
    value = _state(walk, it, "loader")
    value.parts = it.values if it.name == "CombinedLoader" else it.args[:1]
    walk.note(it.node, "made", value, role="loader", name=it.name, given=it)
    return value


def make_parallel(walk: Walk, it: Called) -> Value:
    """Return a model whose gradients are those of the global batch."""
    value = _state(walk, replace(it, name="AdaptiveDataParallel"), "model")
    names = ("module", "model", "optimizer", "lr_scheduler")
    states = [*it.args, *(v for k, v in it.keywords.items() if k in names)]
    value.parts = [each for each in states if each.kind != "const"]
    for part in (*states, value):
        register(part)
    return value


def prepare(walk: Walk, it: Called) -> Value:
    """Return what Accelerate's `prepare(accelerator, model, optimizer, ...)` does."""
    model, rest = make_parallel(walk, replace(it, args=it.args[1:])), it.args[2:]
    return Value("tuple", parts=[model, *rest]) if rest else model


def make_variables(walk: Walk, it: Called) -> Value:
    """Return Variables, with the values that they are given."""
    value = _state(walk, it, "variables")
    value.attrs = {k: v for k, v in it.keywords.items() if k != "name"}
    for each in value.attrs.values():
        each.registered = each.is_container
    return value


def until(_: Walk, it: Called) -> Value:
    """Return a loop of epochs or steps up to a total."""
    kind: Kind = "epochs" if "epochs" in it.name else "steps"
    bound = it.args[:1] or [it.keywords.get(f"num_{kind}", unknown())]
    return Value(kind, it.name, node=it.node, parts=bound)


def make_accumulator(walk: Walk, it: Called) -> Value:
    """Return an Accumulator."""
    value = _state(walk, it, "accumulator")
    value.taints = frozenset(("accumulated",))
    return value
