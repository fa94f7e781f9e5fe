"""Calls of what is not in the project."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import LOG, OPTIMIZER, SAVE, TRACK, Sink
from elasticrun.lint.values import Value, loaders_in, unknown
from elasticrun.lint.walk.arguments import Called, arguments
from elasticrun.lint.walk.effects import effect, note_seeds
from elasticrun.lint.walk.elastic import call_elastic
from elasticrun.lint.walk.language import language
from elasticrun.lint.walk.losses import OF_CRITERIA, of_other_loss, taints_of_loss
from elasticrun.lint.walk.objects import looks_like_model, object_made
from elasticrun.lint.walk.walk import Walk


def call_external(walk: Walk, name: str, node: ast.Call) -> Value:
    """Return what an external call makes, noting its effects."""
    elastic = roles.elastic_name(name)
    if elastic or name.rpartition(".")[2] in walk.options.loaders:
        return call_elastic(walk, elastic or "AdaptiveDataLoader", node)
    given = arguments(walk, node, _sink_for(walk, name))
    it = Called(given.args, given.keywords, name=name, node=node)
    files = [each for each in it.values if each.kind == "file"]
    if files and (name in catalog.SAVES or name == "print"):
        walk.note(node, "written", files[0])
    for find in (effect, object_made, language):
        value = find(walk, it)
        if value is not None:
            return value
    value = _opaque(walk, it)
    value.taints = taints_of_loss(it, value.taints)
    return value


def _sink_for(walk: Walk, name: str) -> Sink:
    if name in catalog.LOGGERS:
        return TRACK if name in catalog.TRACKING else LOG
    return SAVE if name in catalog.SAVES else walk.sink


def call_unknown(walk: Walk, callee: Value, name: str, node: ast.Call) -> Value:
    """Return what a call of something unknown returns."""
    sink = OPTIMIZER if callee.kind in ("model", "optimizer") else walk.sink
    given = arguments(walk, node, sink)
    it = Called(given.args, given.keywords, name=name, node=node)
    value = _opaque(walk, it)
    if looks_like_model(callee):
        value.taints = of_other_loss(value.taints)
    value.taints |= callee.taints & OF_CRITERIA
    return value


def _opaque(walk: Walk, it: Called) -> Value:
    """Return what a call returns of which nothing is known but its arguments."""
    if it.name in roles.ITERATED_SAMPLERS:
        return Value("sampler", it.name, parts=it.values, node=it.node)
    loaders = [each for each in it.values if loaders_in(each)]
    if loaders and it.last not in catalog.LOOKING:
        looks_like_class = it.last[:1].isupper()
        is_iterated = it.node in walk.iterated
        if walk.epoch is None or is_iterated or looks_like_class:
            return Value("wrapped", it.last, parts=it.values, node=it.node)
    note_seeds(walk, it)
    for each in it.values:
        each.is_handed_on = True
    value = unknown(taints=it.taints - {"path"})  # of a path, not a path
    walk.write((value.uid, "[]"), it.node, "set", value, "")
    return value
