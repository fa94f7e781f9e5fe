"""Loops: `for`, `while`, comprehensions; over loaders, epochs and all else."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping

from elasticrun.lint.graph import OPTIMIZER, TEST, DataLoop, EpochLoop, Step, WalkedLoop
from elasticrun.lint.naming import last_name, written
from elasticrun.lint.values import (
    NO_TAINTS,
    Arguments,
    Kind,
    MethodDef,
    Value,
    constant,
    element_of,
    fields_of,
    key_of,
    merged,
    sampling,
    unknown,
)
from elasticrun.lint.walk.expressions import attribute
from elasticrun.lint.walk.functions import call_function, run_function
from elasticrun.lint.walk.walk import Body, Evaluate, Frame, Leaving, RunStatement, Walk

MAX_ELEMENTS = 8  # of a container, for each of which a loop's body is walked through
MAX_YIELDS = 4  # of one generator, each of which runs the loop's body
_LOADERS = ("loader", "plain_loader")
_ITERATED = frozenset(("generator", "iterator", "wrapped", *_LOADERS))
_COUNTING = frozenset(("trange", "count"))
_BATCH = frozenset(("batch",))
_TRUE = frozenset(("epoch",))  # a number that does not depend on restarts


def iterate(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    """Walk through a loop over a value; `body` binds an element and runs."""
    if value.kind == "wrapped":
        _wrapped(walk, value, node, body)
    elif value.kind == "iterator" and value.parts:
        walk.iterate(value.parts[0], node, body)
    elif value.kind in ("steps", *_LOADERS):
        _data_loop(walk, value, node, body)
    elif value.kind == "epochs":
        _epoch_loop(walk, value, node, body)
    elif value.kind == "generator":
        _generator(walk, value, node, body)
    elif value.defines("__iter__"):
        _object_loop(walk, value, node, body)
    elif elements := _few_elements(value):
        _unrolled(walk, elements, node, body)
    else:
        element = element_of(value)
        if value.kind == "range":
            walk.note(node, "counted")
            if walk.epoch is None:
                element.taints |= _TRUE
        _repeated(walk, node, body, element)


def _object_loop(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    """Walk through a loop over an object of a class of the project's."""
    method = attribute(walk, value, "__iter__", node)
    made = call_function(walk, method, node, Arguments())
    if made.defines("__next__"):
        ask = attribute(walk, made, "__next__", node)
        with looping(walk, walk.step(node)):
            body(call_function(walk, ask, node, Arguments()))
    else:
        walk.iterate(made if made.kind in _ITERATED else unknown(), node, body)


def _few_elements(value: Value) -> list[Value]:
    """Return what a container holds, if it is little enough to look at each."""
    if not value.is_complete:
        return []
    is_dict = value.kind == "dict"
    elements = [constant(key) for key in value.attrs] if is_dict else value.elements
    return elements if len(elements) <= MAX_ELEMENTS else []


# Wrappers.


def _wrapped(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    # Of several parts, the iteration of one matters most.
    inner = max(filter(_weight, value.parts), key=_weight, default=None)
    shaped = _counting(walk, body) if value.name == "enumerate" else body
    if value.name == "zip":

        def shaped(element: Value) -> None:
            parts = [element if p is inner else element_of(p) for p in value.parts]
            body(Value("tuple", parts=parts))

    elif value.name == "batches":  # Of passes without end, so that none is short.

        def shaped(element: Value) -> None:
            element.taints |= {"valid"}
            body(element)

    if inner is None:
        if value.name in _COUNTING or any(p.kind == "range" for p in value.parts):
            walk.note(node, "counted")
        _repeated(walk, node, shaped, unknown(taints=value.taints))
    else:
        walk.iterate(inner, node, shaped)


def _counting(walk: Walk, body: Body) -> Body:
    """Return the body of an enumerate, whose index counts from 0 at a restart."""
    outside = walk.loop

    def counted(element: Value) -> None:
        # A list has no place to continue at, nor has a loop in a batch of another one.
        is_own = walk.loop is not outside and not (walk.loop and walk.loop.is_inner)
        index = unknown(frozenset(("enumerated",) if is_own else ()))
        body(Value("tuple", parts=[index, element]))

    return counted


def _weight(value: Value, depth: int = 6) -> int:
    if value.kind in ("epochs", "steps", "loader"):
        return 5
    if value.kind in ("wrapped", "iterator"):
        parts = value.parts if depth else []
        return max((_weight(part, depth - 1) for part in parts), default=0)
    if value.kind in ("generator", *_LOADERS):
        return 4
    if value.defines("__iter__"):
        return 3
    if _few_elements(value):
        return 2
    return int(value.kind in ("param_groups", "param"))


# Loops.


@contextlib.contextmanager
def looping(
    walk: Walk, head: Step, of: WalkedLoop | None = None, *, is_skipped: bool = False
) -> Iterator[None]:
    """Stand on a loop's head; what runs inside leads back to it.

    A loop that may be skipped leaves what was there before; the others have one
    iteration, also if a `break` at the top of their body ends them: that is the next
    one's.
    """
    leaving = Leaving(of)
    walk.frame.loops.append(leaving)
    plain_loops = walk.plain_loops
    walk.plain_loops = (*plain_loops, head.node) if of is None else ()
    yield
    ends = [*walk.here, *leaving.continues]
    for each in ends:
        each.following.append(head)
    walk.frame.loops.pop()
    breaks = leaving.breaks
    if ends and not is_skipped:
        steps = walk.graph.steps[head.number + 1 :]
        written = (s.number for s in steps if s.writes and s.node is not head.node)
        first = next(written, head.number)
        breaks = [each for each in breaks if each.number > first]
    walk.here = [*([head] if is_skipped or not ends else ends), *breaks]
    walk.current, walk.plain_loops = head, plain_loops


def _repeated(walk: Walk, node: ast.AST, body: Body, element: Value) -> None:
    with looping(walk, walk.step(node)):
        body(element)


@contextlib.contextmanager
def _iteration(walk: Walk, leaving: Leaving) -> Iterator[None]:
    """Run an iteration of a loop whose body is walked through for some elements."""
    walk.frame.loops.append(leaving)
    yield
    walk.frame.loops.pop()
    walk.here += leaving.continues
    leaving.continues = []


def _unrolled(walk: Walk, elements: list[Value], node: ast.AST, body: Body) -> None:
    """Walk through a loop's body once for each of a few elements."""
    leaving = Leaving()
    plain_loops, walk.plain_loops = walk.plain_loops, (*walk.plain_loops, node)
    for element in elements:
        walk.step(node)
        with _iteration(walk, leaving):
            body(element)
    walk.here += leaving.breaks
    walk.plain_loops = plain_loops


def _data_loop(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    """Walk through a loop over a loader, or over `remaining_steps_until`."""
    is_elastic = value.kind != "plain_loader"
    loop = DataLoop(
        walk.step(node), walk.plain_loops, _loop_text(node), value, is_elastic
    )
    walk.graph.loops.append(loop)
    with looping(walk, loop.step, loop):
        outer = walk.loop
        # A plain loader's loop has no boundary, so no step is said to be in it.
        if loop.is_elastic:
            walk.loop = loop
        walk.step(node)  # The head is reached behind the last batch, too.
        _read_dataset(walk, value, node)
        if value.kind == "steps":
            element = unknown(_TRUE)
        else:  # All replicas get all of a plain loader.
            element = unknown(_BATCH if loop.is_elastic else NO_TAINTS)
        body(element)
        walk.loop = outer


def _read_dataset(walk: Walk, loader: Value, node: ast.AST) -> None:
    """Note what the methods read that make samples, as these go into training."""
    with walk.into(OPTIMIZER):
        for dataset in loader.parts[:1]:
            for name in dataset.attrs if dataset.cls is not None else ():
                if any(name in fields_of(each) for each in sampling(dataset)):
                    walk.read((dataset.uid, name), node)
                    walk.read((dataset.attrs[name].uid, "[]"), node)


def _epoch_loop(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    """Walk through a loop over `remaining_epochs_until`."""
    made = value.node
    assert isinstance(made, ast.Call)
    given = next(iter((*made.args, *(each.value for each in made.keywords))), None)
    loop = EpochLoop(walk.step(node), walk.plain_loops, given)
    walk.graph.epochs.append(loop)
    with looping(walk, loop.step, loop, is_skipped=True):
        outer, walk.epoch = walk.epoch, loop
        walk.step(node)  # The head is reached behind the last epoch, too.
        body(unknown(_TRUE))
        walk.epoch = outer


# Generators.


def _generator(walk: Walk, value: Value, node: ast.AST, body: Body) -> None:
    """Walk through a generator's body, with the loop's own body at each `yield`."""
    inner: Frame = value.frame
    frame = walk.frame
    function = inner.function
    if function in walk.active or not isinstance(function, MethodDef):
        _repeated(walk, node, body, unknown())
        return
    leaving = Leaving()
    num_yields = 0

    def handed_out(element: Value) -> None:
        nonlocal num_yields
        if num_yields == MAX_YIELDS:
            return
        num_yields += 1
        # The body belongs to the loop's function, not to the generator's.
        active, walk.active = walk.active, walk.active[:-1]
        with walk.inside(frame), _iteration(walk, leaving):
            walk.step(node)  # in the file of the loop
            body(element)
        walk.active = active

    inner.yields = handed_out
    inner.exits = []
    run_function(walk, function, inner, node)
    inner.yields = None
    walk.here += leaving.breaks
    if not walk.here:
        walk.step(walk.frame.statement)


def _loop_text(node: ast.AST) -> str:
    """Return what a loop iterates, as the program writes it."""
    source = getattr(node, "iter", node)
    while isinstance(source, ast.Call):
        name = last_name(source.func)
        if name == "remaining_steps_until":
            break
        if source.args and name != "batches":
            source = source.args[0]
        elif isinstance(source.func, ast.Attribute):
            source = source.func.value
        else:
            break
    return written(source)[:60]


# Loops as they are written.


_KINDS: dict[type[ast.expr], Kind] = {
    ast.ListComp: "list",
    ast.SetComp: "set",
    ast.GeneratorExp: "list",
    ast.DictComp: "dict",
}


def _run_for(walk: Walk, node: ast.For | ast.AsyncFor) -> None:
    frame = walk.frame
    walk.step(node)
    walk.iterated.add(node.iter)
    value = walk.evaluate(node.iter)
    before = dict(frame.env)
    walk.graph.spend(len(before))

    def body(element: Value) -> None:
        walk.assign(node.target, element, how="target")
        walk.run(node.body)

    walk.iterate(value, node, body)
    frame.env = merged(frame.env, before)
    walk.run(node.orelse)


def _run_while(walk: Walk, node: ast.While) -> None:
    head = walk.step(node)
    with looping(walk, head, is_skipped=True):
        with walk.into(TEST):
            test = walk.evaluate(node.test)
        walk.current = head
        with walk.guarded(walk.guard(node.test, test.taints)):
            walk.run(node.body)
    if isinstance(node.test, ast.Constant) and node.test.value:
        walk.here = [each for each in walk.here if each is not head]
    walk.run(node.orelse)


# Comprehensions.


def _evaluate_comprehension(
    walk: Walk, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
) -> Value:
    result = Value(_KINDS[type(node)])

    def add() -> None:
        if isinstance(node, ast.DictComp):
            key, value = walk.evaluate(node.key), walk.evaluate(node.value)
        else:
            key, value = unknown(), walk.evaluate(node.elt)
        result.taints |= key.taints | value.taints
        if (known := key_of(key)) is not None:
            result.attrs[known] = value
        else:
            result.parts.append(value)

    env = dict(walk.frame.env)
    _nest(walk, node, node.generators, add)
    walk.frame.env = env
    result.is_complete = result.kind != "dict" or not result.parts
    return walk.made(result)


def _nest(
    walk: Walk,
    node: ast.expr,
    generators: list[ast.comprehension],
    add: Callable[[], None],
) -> None:
    """Run a comprehension's loops, one within the other, and `add` in the last."""
    if not generators:
        add()
        return
    outer, *inner = generators

    def body(element: Value) -> None:
        walk.assign(outer.target, element, how="target")
        walk.step(node)
        for test in outer.ifs:
            walk.evaluate(test)
        _nest(walk, node, inner, add)

    walk.iterated.add(outer.iter)
    value = walk.evaluate(outer.iter)
    walk.iterate(value, node, body)


STATEMENTS: Mapping[type[ast.stmt], RunStatement] = {
    ast.For: _run_for,
    ast.AsyncFor: _run_for,
    ast.While: _run_while,
}
EXPRESSIONS: Mapping[type[ast.expr], Evaluate] = {
    ast.ListComp: _evaluate_comprehension,
    ast.SetComp: _evaluate_comprehension,
    ast.GeneratorExp: _evaluate_comprehension,
    ast.DictComp: _evaluate_comprehension,
}
