"""What functions and classes outside of the project do and make."""

from __future__ import annotations

import ast
from dataclasses import replace
from keyword import iskeyword

from elasticrun.lint import naming
from elasticrun.lint.naming import LOOKING, written
from elasticrun.lint.values import (
    NO_TAINTS,
    OF_CONTENT,
    UNFIXED,
    Arguments,
    Class,
    Kind,
    Value,
    constant,
    elastic_loaders_in,
    external,
    key_of,
    loaders_in,
    next_uid,
    register,
    unknown,
)
from elasticrun.lint.walk.functions import Called
from elasticrun.lint.walk.losses import OF_CRITERIA, OF_LOSSES, taints_of_labels
from elasticrun.lint.walk.walk import Walk


def call_unknown(walk: Walk, callee: Value, it: Called) -> Value:
    """Return what a call of something unknown, or of its method, returns."""
    value = opaque(walk, it)
    if callee.is_model:
        value.taints -= OF_LOSSES  # What a model makes is none.
        value.taints |= taints_of_labels(it, walk.frame.module.text)
    value.taints |= callee.taints & OF_CRITERIA
    wrapper = walk.wrapped.get(callee.uid)
    if wrapper is not None and wrapper not in callee.also:
        is_past = callee in wrapper.parts
        walk.note(it.node, "past" if is_past else "through", wrapper)
        value.taints |= {"past"} if is_past else NO_TAINTS
    return value


def opaque(walk: Walk, it: Called) -> Value:
    """Return what a call returns of which nothing is known but its arguments."""
    loaders = [each for each in it.values if loaders_in(each)]
    if loaders and it.last not in LOOKING:
        looks_like_class = it.last[:1].isupper()
        is_iterated = it.node in walk.iterated
        if walk.epoch is None or is_iterated or looks_like_class:
            return Value("wrapped", it.last, parts=it.values, node=it.node)
    for each in it.values:
        each.is_handed_on = True
    value = unknown(taints=it.taints - {"path"})  # of a path, not a path
    walk.write((value.uid, "[]"), it.node, "set", value, "")
    return value


# Random numbers.


def draw(walk: Walk, it: Called) -> Value:
    """Return a random draw."""
    own = next((each for each in it.values if each.kind == "rng"), None)
    by_name = {"generator", "random_state", "seed"} & it.keywords.keys()
    is_fixed = not any(it.keywords[key].taints & UNFIXED for key in by_name)
    is_keyed = own is not None or (bool(by_name) and is_fixed)
    has_seed = is_keyed or is_seeded(walk, it.name)
    walk.note(
        it.node, "drawn", own, name=it.name, is_seeded=has_seed, how=walk.sink.kind
    )
    is_same = is_keyed or (walk.epoch is None and has_seed)
    return unknown(taints=NO_TAINTS if is_same else frozenset(("random",)))


def split(walk: Walk, it: Called) -> Value | None:
    """Return what scikit-learn's splitters draw, if they are asked to shuffle."""
    shuffle = it.keywords.get("shuffle")
    is_asked = shuffle is not None and bool(shuffle.constant)  # None but of constants
    shuffles = is_asked or it.last.endswith("ShuffleSplit")
    return draw(walk, it) if shuffles else None


def seed(walk: Walk, it: Called) -> Value:
    """Note a seed; return a generator if it is given one of its own."""
    if naming.made_by(it.name) == "rng":
        return make(walk, it)  # a generator of its own; the global one is as it was
    if it.values and not it.taints & UNFIXED:
        walk.seeded.add(it.name.split(".", 1)[0])
    return unknown()


def is_seeded(walk: Walk, name: str) -> bool:
    """Return whether the generator behind a draw has been given a seed."""
    family = name.split(".", 1)[0]
    family = "numpy" if family == "sklearn" else family
    general = walk.seeded - {"torch", "numpy", "random"}
    return family in walk.seeded or bool(general)


# What changes weights, and what all replicas do together.


def change_weights(walk: Walk, it: Called) -> Value:
    """Note that weights are changed in place."""
    given = [each for first in it.args[:1] for each in (first, *first.parts)]
    found = [each.owner for each in given if each.kind == "param"]
    weights = next(iter([*found, *given]), None)
    walk.note(it.node, "trained", weights, role="weights")
    return unknown()


OF_ONE_REPLICA = frozenset(("rank", "batch"))


def agree(walk: Walk, it: Called) -> Value:
    """Note a collective; what it returns is the same on every rank."""
    walk.note(it.node, "collective", name=it.last)
    if it.last in ("all_reduce", "broadcast", "broadcast_object_list"):
        for given in it.args[:1]:
            for each in (given, *given.parts):
                each.taints -= OF_ONE_REPLICA  # in place
    return unknown(taints=it.taints - OF_ONE_REPLICA)


# Iteration.


def next_(walk: Walk, it: Called) -> Value | None:
    """Return an element that an iterator is asked for by hand."""
    if not it.args:
        return None
    source = it.args[0]
    walk.note(it.node, "asked", source, plain_loops=walk.plain_loops)
    is_batch = bool(elastic_loaders_in(source))
    return unknown(taints=it.taints | frozenset(("batch",) if is_batch else ()))


def iterator(walk: Walk, it: Called) -> Value | None:
    """Return an iterator over a value, noting that it is iterated by hand."""
    for source in it.args[:1]:
        walk.note(it.node, "iterated", source)
    made_at = walk.current.number
    return Value("iterator", it.last, parts=it.args[:1], node=it.node, made_at=made_at)


def wrap(_: Walk, it: Called) -> Value | None:
    """Return a progress bar, an enumeration, ... of what a call is given."""
    parts = it.args if it.last == "zip" else it.values
    if not parts:
        return None
    return Value("wrapped", it.last, parts=parts, node=it.node, taints=it.taints)


def consume(walk: Walk, it: Called) -> Value | None:
    """Walk through the loop of a function that takes all elements."""
    for value in it.args:
        if value.kind in ("loader", "wrapped", "generator"):
            walk.iterate(value, it.node, lambda _: None)
    return unknown(taints=it.taints) if it.args else None


def make_list(walk: Walk, it: Called) -> Value:
    """Return the list or set that a call makes of what it is given."""
    first = it.args[0] if it.args else Value("list")
    is_ready = first.is_container or first.kind == "tuple"
    if is_ready and it.last in ("list", "tuple"):
        made = Value("list", parts=first.parts, is_complete=first.is_complete)
        made.is_empty = not it.args
        return walk.made(made)
    consume(walk, it)
    is_set = it.last in ("set", "frozenset")
    made = Value("set" if is_set else "list", node=it.node, taints=it.taints)
    made.parts = [first] if first.kind == "param" and not is_set else []
    made.is_complete, made.is_empty = not is_set, is_set and not it.args
    return walk.made(made)


# Objects.


def make(walk: Walk, it: Called) -> Value:
    """Return the object that a call makes of a kind that its name tells."""
    kind = naming.made_by(it.name)
    assert kind is not None
    value = walk.made(Value(kind, it.name, node=it.node, parts=it.values))
    walk.note(it.node, "made", value, role=kind, name=it.name, given=it)
    return value


def wrap_model(walk: Walk, it: Called) -> Value | None:
    """Return the model that wraps the one that a call is given, if it is given one."""
    inner = next((each for each in it.args if each.is_model), None)
    if inner is None:
        return None
    made = Value("model", inner.name, node=it.node, parts=[inner])
    made.registered = inner.registered
    if inner.uid in walk.wrapped:
        walk.wrapped[made.uid] = walk.wrapped[inner.uid]
    return walk.made(made)


def copy(walk: Walk, it: Called) -> Value | None:
    """Return a copy of a value, which no state has."""
    if not it.args:
        return None
    original = it.args[0]
    made = replace(
        original, node=it.node, owner=None, also=[], registered=False,
        is_loaded_by_hand=False, is_handed_on=False, uid=next_uid(),
    )  # fmt: skip
    given = Arguments([made])
    walk.note(it.node, "made", original, role="copy", given=given)
    return walk.made(made) if original.is_object else made


# Files.


def open_named(walk: Walk, it: Called) -> Value:
    """Return an open file, whose path is the first argument."""
    text = written(it.node.args[0]) if it.node.args else ""
    return open_file(walk, it, it.args[0] if it.args else unknown(), it.args[1:], text)


def open_file(
    walk: Walk, it: Called, path: Value, rest: list[Value], text: str
) -> Value:
    """Return an open file, noting its path, and its mode from the other arguments."""
    mode = key_of(it.keywords.get("mode") or next(iter(rest), constant("r")))
    mode = mode if isinstance(mode, str) else "?"
    value = walk.made(Value("file", path.name, node=it.node, mode=mode))
    paths = Arguments([path])
    walk.note(it.node, "opened", value, given=paths, text=text, how=mode)
    return value


def log_file(walk: Walk, it: Called) -> None:
    """Note a file to which the process logs."""
    path = it.keywords.get("filename") or next(iter(it.args), None)
    if path is not None:
        given = it.keywords.get("filemode") or it.keywords.get("mode")
        mode = given or next(iter(it.args[1:]), constant("a"))
        paths, how = Arguments([path]), str(key_of(mode))
        walk.note(it.node, "opened", given=paths, name=it.name, how=how)


# Containers.

_FACTORIES: dict[str, Kind] = {"list": "list", "dict": "dict", "set": "set"}


def field(walk: Walk, it: Called) -> Value | None:
    """Return what a field of a data class holds at first, if that is a container."""
    factory = it.keywords.get("default_factory")
    kind = _FACTORIES.get(factory.name) if factory is not None else None
    return walk.made(Value(kind, node=it.node)) if kind is not None else None


def make_collection(walk: Walk, it: Called) -> Value:
    """Return a new container of the standard library's, with its factory."""
    kind: Kind = "list" if it.last == "deque" else "dict"
    factory = [each for each in it.args if each.name == "list"]
    return walk.made(Value(kind, node=it.node, parts=factory, is_complete=False))


def make_dict(walk: Walk, it: Called) -> Value | None:
    """Return a dictionary, or a record with the attributes that it is given."""
    if it.args:
        return consume(walk, it) if it.last == "dict" else None
    kind: Kind = "dict" if it.last in ("dict", "vars") else "instance"
    is_empty = it.last == "dict" and not it.values
    return walk.made(Value(kind, node=it.node, attrs=it.keywords, is_empty=is_empty))


def make_record(walk: Walk, it: Called) -> Value | None:
    """Return the class that `namedtuple("Name", "first second")` makes."""
    if len(it.args) < 2:
        return None
    names = [part.constant for part in it.args[1].parts]
    if isinstance(it.args[1].constant, str):
        names = it.args[1].constant.replace(",", " ").split()
    if not all(f"{each}".isidentifier() and not iskeyword(f"{each}") for each in names):
        return None  # With rename=True they have other names.
    fields = (f"    {each}: object" for each in names)
    [node] = ast.parse("\n".join(["class Record:", *fields, "    pass"])).body
    assert isinstance(node, ast.ClassDef)
    cls = Class(node, walk.frame.module, walk.frame, [external("typing.NamedTuple")])
    return Value("class", node.name, node=node, cls=cls)


def write_content(
    walk: Walk, value: Value, node: ast.AST, how: str, text: str, content: Value
) -> None:
    """Note a change of what a container holds, and so of what holds it."""
    walk.write((value.uid, "[]"), node, how, content, text)
    owner, depth = value.owner, 0
    while owner is not None and depth < 4:
        walk.bases[owner.uid] = owner
        value.registered |= owner.is_durable
        walk.write((owner.uid, "[]"), node, how, owner, text)
        owner, depth = owner.owner, depth + 1


def grow(walk: Walk, value: Value, node: ast.AST, text: str, content: Value) -> None:
    """Note that something is added to a container."""
    is_time = content.taints == frozenset(("time",))  # of which a loss is harmless
    write_content(walk, value, node, "grow", text, content if is_time else value)
    walk.note(node, "changed", value, how="grow", text=text, taints=content.taints)
    value.taints |= content.taints & OF_CONTENT


# What elasticrun itself offers.


def register_all(walk: Walk, it: Called) -> Value:
    """Register what `register` is given."""
    for value in it.values:
        register(value)
    walk.note(it.node, "state", name="register", given=it)
    named = [each for each in it.node.keywords if each.arg is not None]
    if len(it.keywords) == len(named) < len(it.node.keywords):
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
    walk.wrapped |= {each.uid: value for each in (value, *value.parts[:1])}
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
