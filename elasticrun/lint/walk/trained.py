"""Methods of what is trained, and of what trains it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from elasticrun.lint.graph import OPTIMIZER, VALUE
from elasticrun.lint.naming import named, written
from elasticrun.lint.values import Arguments, Value, constant, unknown
from elasticrun.lint.walk.arguments import Handle, MethodCall
from elasticrun.lint.walk.functions import call_function
from elasticrun.lint.walk.walk import Walk

_CHAINING = named(
    "to cuda cpu half float double bfloat16 train eval requires_grad_ detach "
    "contiguous share_memory compile type channels_last apply"
)
_PARAMETERS = named(
    "parameters named_parameters buffers named_buffers state_dict values items "
    "children modules named_modules keys"
)
_HARMLESS_IN_PLACE = named(
    "requires_grad_ copy_ detach_ zero_grad retain_grad share_memory_ register_"
)
_EMA_UPDATES = frozenset(("update", "update_parameters", "step", "update_average"))


def _scheduler_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name not in ("step", "step_update"):
        return None
    it.arguments(walk, OPTIMIZER)
    walk.note(it.node, "trained", it.receiver, role="scheduler")
    return constant(None)


def _optimizer_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name != "step":
        return None
    given = it.arguments(walk, OPTIMIZER)
    walk.note(it.node, "trained", it.receiver, role="optimizer")
    for closure in given.values:
        if closure.kind == "func":
            return call_function(walk, closure, Arguments(), it.node)
    return constant(None)


def _scaler_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name == "load_state_dict":
        return loaded(walk, it)
    args = it.arguments(walk, VALUE).args
    if it.name == "step":
        walk.note(
            it.node, "trained", args[0] if args else it.receiver, role="optimizer"
        )
    elif it.name == "update":
        walk.note(it.node, "trained", it.receiver, role="scaler")
    elif it.name == "scale" and args:
        return args[0]
    return constant(None)


def _ema_method(walk: Walk, it: MethodCall) -> Value | None:
    if it.name in _EMA_UPDATES:
        it.arguments(walk, OPTIMIZER)
        walk.note(it.node, "trained", it.receiver, role="ema")
        return constant(None)
    return model_method(walk, it)


def loaded(walk: Walk, it: MethodCall) -> Value:
    """Mark what `load_state_dict` fills: the program cares for its state itself."""
    it.arguments(walk, OPTIMIZER)
    for each in (it.receiver, *it.receiver.parts, *it.receiver.also):
        each.is_loaded_by_hand = True
    walk.note(it.node, "trained", it.receiver, role="loaded")
    return constant(None)


def model_method(walk: Walk, it: MethodCall) -> Value | None:
    """Return what a model's method returns; None if it says nothing of its weights."""
    if it.name in ("apply", "reset_parameters", "init_weights"):
        it.arguments(walk)
        walk.note(it.node, "trained", it.receiver, role="weights", how=it.name)
        return it.receiver
    if it.name in _CHAINING:
        it.arguments(walk)
        return it.receiver
    if it.name == "weigh":  # Which is told a loader, and does not loop over it.
        it.arguments(walk)
        return unknown()
    if it.name in _PARAMETERS:
        return Value("param", it.name, sure=it.receiver.sure, owner=it.receiver)
    return None


def _param_method(walk: Walk, it: MethodCall) -> Value | None:
    model = it.receiver.owner or it.receiver
    if it.name in ("apply", "reset_parameters"):
        return model_method(walk, it._replace(receiver=model))
    it.arguments(walk, OPTIMIZER)
    if it.name == "backward":
        walk.note(it.node, "backward", taints=it.receiver.taints)
    is_in_place = it.name.endswith("_") and not it.name.startswith("_")
    if it.name == "copy_" and _names_itself(it):
        walk.note(it.node, "trained", model, role="weights", how="in place")
    elif is_in_place and it.name not in _HARMLESS_IN_PLACE:
        walk.note(it.node, "trained", model, role="weights", how=it.name)
    return it.receiver


def _names_itself(it: MethodCall) -> bool:
    """Return whether what is copied is made of what it replaces, as averages are."""
    given = [node for each in it.node.args for node in ast.walk(each)]
    return any(isinstance(e, ast.expr) and written(e) == it.text for e in given)


METHODS: Mapping[str, Handle] = {
    "scheduler": _scheduler_method,
    "optimizer": _optimizer_method,
    "scaler": _scaler_method,
    "ema": _ema_method,
    "model": model_method,
    "param": _param_method,
}
