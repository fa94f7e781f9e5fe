"""ER002, ER206, ER207, ER501, ER503: loops, and what they are over."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, EpochLoop, Event, Site, WalkedLoop
from elasticrun.lint.naming import named, written
from elasticrun.lint.program import Program
from elasticrun.lint.values import Value, elastic_loaders_in

ER002 = Rule(
    "ER002 W looks elastic, but the epoch loop is range()",
    help="write `for epoch in remaining_epochs_until(n):`",
)
ER206 = Rule(
    "ER206 E bound of epochs or steps is a total, and already reached",
    help="give the number that the whole job has finished after this loop",
)
ER207 = Rule(
    "ER207 W iterator of a loader that does not fit the position",
    help="loop with `for x, y in loader.batches(n):`",
)
ER501 = Rule(
    "ER501 W unseeded data",
    help="seed it: torch.manual_seed(0) at the top, or a seeded generator=",
)
ER503 = Rule(
    "ER503 W batch size, learning rate or steps from the world size",
    help="give the global batch size, and what belongs to it",
)


def _bounds(program: Program) -> Iterator[Finding]:
    """Yield loops whose bound is reached in the first turn of a plain loop around."""
    steps = [each for each in program.graph.loops if each.loader.kind == "steps"]
    loops: list[EpochLoop | DataLoop] = [*program.graph.epochs, *steps]
    for loop in loops:
        plain_loops = [
            *([loop.epoch.at] if loop.epoch is not None else []),
            *loop.plain_loops,
        ]
        for around in plain_loops[-1:]:
            if _is_fixed(loop, around) and _is_entered_again(program, loop, around):
                what = "epoch" if isinstance(loop, EpochLoop) else "step"
                message = (
                    f"the bound of this {what} loop is a total: only the first turn of "
                    f"the loop at line {getattr(around, 'lineno', 0)} has any {what}s"
                )
                yield program.finding(ER206, loop, message)


def _is_fixed(loop: EpochLoop | DataLoop, around: ast.AST) -> bool:
    """Return whether a loop has the same bound in each turn of the one around."""
    if isinstance(loop, DataLoop):
        return isinstance(loop.loader.parts[0].constant, int)
    if not isinstance(loop.bound, ast.Name | ast.Attribute):
        return isinstance(loop.bound, ast.Constant)
    inside = set(ast.walk(around))
    changed = {
        written(each)
        for each in inside
        if isinstance(each, ast.Name | ast.Attribute)
        and isinstance(each.ctx, ast.Store)
    }
    name = written(loop.bound)
    return name not in changed and (loop.at in inside or name.isupper())


def _is_entered_again(program: Program, loop: WalkedLoop, around: ast.AST) -> bool:
    """Return whether later turns of a loop around come to one inside.

    A loop that is entered again only after an error continues where it was left.
    """
    handlers = (e for e in ast.walk(around) if isinstance(e, ast.ExceptHandler))
    handled = {id(node) for each in handlers for node in ast.walk(each)}
    after = program.graph.forward(
        [loop.step], lambda step: id(step.node) not in handled
    )
    return any(each.node is around for each in after)


def _iterators(program: Program) -> Iterator[Finding]:
    for event in program.events("iterated"):
        name = written(event.at.func) if isinstance(event.at, ast.Call) else ""
        is_elastic = event.value is not None and elastic_loaders_in(event.value)
        if is_elastic and name.endswith("cycle"):
            message = "cycle() repeats only what it has seen since the last restart"
            yield program.finding(ER207, event, message)
    for loop in program.graph.loops:
        source = loop.at.iter if isinstance(loop.at, ast.For) else None
        if source is None or loop.loader.kind != "loader" or loop.outer is not None:
            continue
        for call in ast.walk(source):
            name = written(call.func) if isinstance(call, ast.Call) else ""
            if name.endswith("islice") or (name == "zip" and "range(" in written(call)):
                message = (
                    f"{name}() counts from 0 again when the interrupted loop goes on, "
                    "which then delivers more batches"
                )
                yield program.finding(ER207, loop, message)
                break


def _ranges(program: Program) -> Iterator[Finding]:
    """Yield plain loops around loops over loaders, or steps, that begin at 0 again."""
    counted = {event.at for event in program.events("counted")}
    # What is around whole loops of epochs is no loop of epochs itself.
    seen = {
        plain_loop for epoch in program.graph.epochs for plain_loop in epoch.plain_loops
    }
    for loop in program.graph.loops:
        plain_loop = next(iter(loop.plain_loops), None)
        is_outside = loop.epoch is None and loop.loader.kind == "loader"
        if plain_loop is None or plain_loop in seen or not is_outside:
            continue
        if plain_loop in counted or _counts(plain_loop):
            seen.add(plain_loop)
            message = (
                "epoch loop by `while`: a restart does not enter it where it was left"
                if isinstance(plain_loop, ast.While)
                else "epoch loop over range(): every restart begins again at epoch 0"
            )
            yield program.finding(ER002, _head(program, plain_loop), message)
    asking = {
        plain_loop
        for event in program.events("asked")
        for plain_loop in event.plain_loops
    }
    for event in program.events("trained", role="optimizer"):
        is_outside = event.step.epoch is None and event.step.loop is None
        if not is_outside or not event.registered or not event.plain_loops:
            continue
        outermost = event.plain_loops[0]
        is_counting = outermost in counted or _counts(outermost)
        is_asking = bool(asking & set(event.plain_loops))
        if is_counting and outermost not in seen and not is_asking:
            seen.add(outermost)
            message = (
                "training loop without a boundary: the job neither saves nor stops "
                "before its end, and a restart begins it again"
            )
            help_text = "loop over remaining_steps_until(n), or over a loader"
            where = _head(program, outermost)
            yield program.finding(ER002, where, message, help_text=help_text)


def _head(program: Program, node: ast.AST) -> Site:
    return Site(node, next(e for e in program.graph.steps if e.node is node))


def _counts(node: ast.AST) -> bool:
    text = written(node.iter) if isinstance(node, ast.For) else ""
    return isinstance(node, ast.While) or "range(" in text or "count(" in text


# Data, and sizes.

_SIZES = named(
    "batch_size lr max_lr learning_rate total_steps num_training_steps T_max "
    "num_warmup_steps steps_per_epoch warmup_steps step_size epochs milestones "
    "total_iters base_lr max_local_batch_size t_initial"
)
_WORDS = ("step", "total", "warm", "lr", "batch", "epoch", "iter")  # of own classes
_POSITIONS = {  # of parameters that matter here
    "loader": ("dataset", "batch_size"),
    "optimizer": ("params", "lr"),
    "scheduler": ("optimizer", "total_steps", "total_steps"),
}
_SHARING = frozenset(("rank", "world_size"))


def _unseeded(program: Program) -> Iterator[Finding]:
    for event in program.events("drawn"):
        if event.how == "optimizer":  # first weights, which come back
            continue
        if event.is_seeded or program.zone(event.step) != "P":
            continue
        message = f"{event.name} without a seed gives other data after every restart"
        yield program.finding(ER501, event, message)


def _sizes(program: Program) -> Iterator[Finding]:
    for event in program.events("made"):
        if event.role not in _POSITIONS:
            continue
        own = event.value.attrs if event.value is not None else {}
        messages = [
            _misfit(event.role, name, value, is_own=value in own.values())
            for name, value in [*_arguments(event), *own.items()]
        ]
        if any(messages):
            yield program.finding(ER503, event, next(filter(None, messages)))


def _misfit(role: str, name: str, value: Value, *, is_own: bool) -> str:
    """Return why what an object is given is not the same everywhere, if so."""
    if "world_size" in value.taints and _is_size(name, is_own):
        return (
            f"{name} is computed from the world size, so it changes when the number of "
            "replicas does"
        )
    if role == "loader" and name == "dataset" and value.taints >= _SHARING:
        return (
            "the data set is cut by the rank or the world size; a loader needs the "
            "whole one, the same on all replicas, and cuts it itself"
        )
    return ""


def _arguments(made: Event) -> Iterator[tuple[str, Value]]:
    """Yield what an object is given, each with the name of its parameter."""
    yield from made.given.keywords.items()
    yield from zip(_POSITIONS[made.role], made.given.args, strict=False)


def _is_size(name: object, is_own: bool) -> bool:
    """Return whether a name says that a value belongs to batches, rates or steps."""
    text = str(name).lower()
    return name in _SIZES or (is_own and any(word in text for word in _WORDS))


CHECKS = (_bounds, _iterators, _ranges, _unseeded, _sizes)
