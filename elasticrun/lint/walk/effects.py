"""Calls that do something: draw, seed, write, send, log, wait for the others."""

from __future__ import annotations

from elasticrun.lint import catalog, roles
from elasticrun.lint.values import (
    NO_TAINTS,
    UNFIXED,
    Arguments,
    Value,
    constant,
    unknown,
)
from elasticrun.lint.walk.arguments import Called
from elasticrun.lint.walk.elastic import assume_loop
from elasticrun.lint.walk.walk import Walk

_ON_GRADIENTS = frozenset(("clip_grad_norm_", "clip_grad_value_", "backward"))
_ON_ALL = "torch._foreach_"
_SPLITTERS = ("sklearn.model_selection.", "sklearn.utils.")


def effect(walk: Walk, it: Called) -> Value | None:
    """Return what a call with an effect returns; None if it has none."""
    if it.name in catalog.SEEDERS:
        return _seed(walk, it)
    if it.name in catalog.DRAWS:
        return _draw(walk, it)
    if it.name in catalog.LOGGERS:
        walk.note(it.node, "logged")
        return constant(None)
    if it.name.startswith(_SPLITTERS) and _shuffles(it):
        return _draw(walk, it)
    return _outer_effect(walk, it) or _effect_on_all(walk, it)


def _outer_effect(walk: Walk, it: Called) -> Value | None:
    """Note what changes files and services."""
    if it.name in catalog.OUTSIDE:
        walk.note(it.node, "sent", name=it.name)
    elif it.name in catalog.UNREPEATABLE or it.name == "os.makedirs":
        walk.note(it.node, "moved", name=it.name, catching=walk.catching)
    elif it.name in catalog.PORTS:
        walk.note(it.node, "port", name=it.name)
    elif it.name in catalog.SAVES:
        walk.note(it.node, "saved", name=it.name)
    else:
        return None
    return unknown()


def _effect_on_all(walk: Walk, it: Called) -> Value | None:
    """Note what changes weights, and what all replicas do together."""
    if it.last in catalog.COLLECTIVES and it.name.startswith(
        ("torch.distributed", "dist")
    ):
        walk.note(it.node, "collective", name=it.last)
        return unknown(taints=it.taints - {"rank"})
    if it.name.startswith("torch.nn.init.") or "prune" in it.name.split("."):
        weights = next(iter(it.args), None)
        if weights is not None and weights.kind == "param":
            weights = weights.owner
        walk.note(it.node, "trained", weights, role="weights", how=it.name)
    elif it.name.startswith(_ON_ALL) and it.last.endswith("_") and it.args:
        all_of_them = (it.args[0], *it.args[0].parts)
        weights = next((each for each in all_of_them if each.kind == "param"), None)
        if weights is not None:
            how = it.name.removeprefix(_ON_ALL)
            walk.note(it.node, "trained", weights.owner, role="weights", how=how)
    elif it.last == "update_bn" and it.args:
        assume_loop(walk, it.args[0], it.node)
    elif it.last not in _ON_GRADIENTS:
        return None
    return unknown()


def _draw(walk: Walk, it: Called) -> Value:
    own = next((each for each in it.values if each.kind == "rng"), None)
    by_name = {"generator", "random_state", "seed"} & it.keywords.keys()
    is_keyed = bool(by_name) or own is not None
    note_seeds(walk, it)
    has_seed = is_seeded(walk, it.name)
    walk.note(
        it.node, "drawn", own, name=it.name, is_keyed=is_keyed, is_seeded=has_seed
    )
    is_same = is_keyed or (walk.epoch is None and has_seed)
    return unknown(taints=NO_TAINTS if is_same else frozenset(("random",)))


def note_seeds(walk: Walk, it: Called) -> None:
    """Note a seed that a call gets by keyword, if it is no fixed one."""
    for key in ("seed", "random_state"):
        value = it.keywords.get(key)
        if value is not None and value.taints & UNFIXED:
            walk.note(it.node, "seeded", name=it.name, given=Arguments([value]))


def _seed(walk: Walk, it: Called) -> Value | None:
    walk.note(it.node, "seeded", name=it.name, given=it)
    if roles.made_by(it.name) == "rng":
        return None  # a generator of its own; the global one is as it was
    if it.values and not it.taints & UNFIXED:
        walk.seeded.add(it.name.split(".", 1)[0])
    return unknown()


def is_seeded(walk: Walk, name: str) -> bool:
    """Return whether the generator behind a draw has been given a seed."""
    family = name.split(".", 1)[0]
    family = "numpy" if family == "sklearn" else family
    general = walk.seeded - {"torch", "numpy", "random"}
    return family in walk.seeded or bool(general)


def _shuffles(it: Called) -> bool:
    shuffle = it.keywords.get("shuffle")
    is_asked = shuffle is not None and bool(shuffle.constant)  # None but of constants
    return is_asked or it.last.endswith("ShuffleSplit")
