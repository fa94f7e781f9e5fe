"""ER002, ER203, ER206, ER207: loops that a restart cannot enter where they were."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, EpochLoop, Spot, Step, WalkedLoop
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked, doubts
from elasticrun.lint.values import Value, elastic_loaders_in

ER206 = Rule(
    "ER206 E bound of epochs or steps is a total, and already reached",
    help="give the number that the whole job has finished after this loop",
)


def _bounds(program: Walked) -> Iterator[Finding]:
    """Yield loops of epochs or steps whose constant bound is reached already."""
    steps = [each for each in program.graph.loops if each.loader.kind == "steps"]
    loops: list[WalkedLoop] = [*program.graph.epochs, *steps]
    for index, loop in enumerate(loops):
        what = "epoch" if isinstance(loop, EpochLoop) else "step"
        earlier = (each for each in loops[:index] if _reaches(program, each, loop))
        if (turn := _turn_again(program, loop)) is not None:
            message = (
                f"{what} loop inside the loop at line {getattr(turn, 'lineno', 0)} "
                "with the same bound each time; the bound is a total, so only the "
                f"first turn {'trains' if what == 'epoch' else 'takes steps'}"
            )
        elif (first := next(earlier, None)) is not None:
            message = (
                f"the bound of this {what} loop is a total, and the loop at line "
                f"{first.line} reaches it already"
            )
        else:
            continue
        yield program.finding(ER206, loop, message)


def _total(loop: WalkedLoop) -> int | None:
    """Return a loop's constant bound, if it stands where its turns can be counted."""
    bound: Value | None = None
    if isinstance(loop, EpochLoop):
        bound = loop.bound_value if loop.epoch is None else None
    elif isinstance(loop, DataLoop) and loop.outer is None:
        bound = loop.loader.parts[0]
    total = bound.constant if bound is not None else None  # None but of constants
    return total if isinstance(total, int) else None


def _reaches(program: Walked, first: WalkedLoop, second: WalkedLoop) -> bool:
    """Return whether a loop takes all turns that a later one could take."""
    known, total = _total(first), _total(second)
    if type(first) is not type(second) or known is None or total is None:
        return False
    return total <= known and second.step in program.graph.forward([first.step])


def _turn_again(program: Walked, loop: WalkedLoop) -> ast.AST | None:
    """Return the loop around whose later turns find the bound reached.

    A loop that is entered again only after an error continues where it was left.
    """
    around = [loop.epoch.at] if loop.epoch is not None else []
    turn = next(reversed((*around, *loop.turns)), None)
    bound = loop.bound if isinstance(loop, EpochLoop) else None
    is_fixed = _total(loop) is not None or isinstance(bound, ast.Name | ast.Attribute)
    if turn is None or not is_fixed or _may_change(loop, turn):
        return None
    handlers = [each for each in ast.walk(turn) if isinstance(each, ast.ExceptHandler)]
    handled = {id(node) for handler in handlers for node in ast.walk(handler)}
    after = program.graph.forward(
        [loop.step], lambda step: id(step.node) not in handled
    )
    return turn if any(each.node is turn for each in after) else None


def _may_change(loop: WalkedLoop, turn: ast.AST) -> bool:
    """Return whether a later turn of the loop around may have another bound."""
    bound = loop.bound if isinstance(loop, EpochLoop) else None
    nodes = list(ast.walk(turn))
    names = [each for each in nodes if isinstance(each, ast.Name | ast.Attribute)]
    changing = {written(each) for each in names if isinstance(each.ctx, ast.Store)}
    is_inside = any(each is loop.at for each in nodes)
    return written(bound or ast.Pass()) in changing or any(
        each.id in changing or not (is_inside or each.id.isupper())
        for each in ast.walk(bound or ast.Pass())
        if isinstance(each, ast.Name)
    )


ER203 = Rule(
    "ER203 E loops over elastic loaders that overlap",
    help=(
        "loop over CombinedLoader([a, b]), or over them in turn, or over one inside "
        "each batch of the other"
    ),
)


ER207 = Rule(
    "ER207 W iterator of a loader that does not fit the position",
    help="loop with `for x, y in loader.batches(n):`",
)


def _iterators(program: Walked) -> Iterator[Finding]:
    for event in program.events("zipped"):
        if sum(len(elastic_loaders_in(each)) for each in event.given.args) >= 2:
            message = "zip of elastic loaders: a job cannot resume two loops at once"
            yield program.finding(ER203, event, message)
    yield from _first_batches(program)
    yield from _cycles(program)
    yield from _cut(program)
    yield from _asked(program)


def _first_batches(program: Walked) -> Iterator[Finding]:
    """Yield each `next(iter(loader))` outside of a batch; in one it ends at once."""
    for event in program.events("asked"):
        node, loop = event.at, event.step.loop
        given = node.args[:1] if isinstance(node, ast.Call) else []
        is_inline = any(isinstance(each, ast.Call) for each in given)
        if event.value is None or not is_inline or (loop is not None and loop.sure):
            continue
        if elastic_loaders_in(event.value) and len(event.given.args) < 2:
            message = (
                "next(iter(loader)) begins a loop; after a restart that loop is "
                "finished, and `next` raises StopIteration"
            )
            help_text = "take a sample from the data set"
            yield program.finding(ER207, event, message, help_text=help_text)


def _cycles(program: Walked) -> Iterator[Finding]:
    for event in program.events("iterated"):
        name = written(event.at.func) if isinstance(event.at, ast.Call) else ""
        if event.value is None or not name.endswith("cycle"):
            continue
        if elastic_loaders_in(event.value):
            message = (
                "cycle() of an elastic loader repeats the batches that it has kept, "
                "after a restart only those since then"
            )
            yield program.finding(ER207, event, message)


def _cut(program: Walked) -> Iterator[Finding]:
    """Yield loops that something ends which counts their batches from 0."""
    for loop in program.graph.loops:
        source = loop.at.iter if isinstance(loop.at, ast.For) else None
        if source is None or loop.loader.kind != "loader" or loop.outer is not None:
            continue
        for call in ast.walk(source):
            name = written(call.func) if isinstance(call, ast.Call) else ""
            if name.endswith("islice") or (name == "zip" and "range(" in written(call)):
                message = (
                    f"{name}() around an elastic loader begins anew when the "
                    "interrupted loop continues, so that it delivers more batches"
                )
                yield program.finding(ER207, loop, message, doubts=doubts(loop))
                break


def _asked(program: Walked) -> Iterator[Finding]:
    """Yield iterators that are asked where they cannot go on after a restart."""
    kept: list[tuple[Event, Value, Step]] = []  # with the loader, and where it was made
    for event in program.events("asked"):
        source = event.value
        if source is None or source.kind != "iterator":
            continue
        made = program.graph.steps[source.made_at]
        loaders = elastic_loaders_in(source)
        if loaders and made is not event.step:
            kept.append((event, loaders[0], made))
    seen: set[tuple[int, str]] = set()
    for event, loader, made in kept:
        if event.value is not None and event.value.name == "cycle":
            continue  # Of it ER207 speaks, where it is made.
        message = _overlap(program, event, loader, made, kept)
        rule, where = ER203, Spot(event.at, event.step)
        if not message and event.step.loop is None:
            message = _begun_anew(program, event, made)
            rule, where = ER207, Spot(made.node, made)
        if message and (id(where.at), message) not in seen:
            seen.add((id(where.at), message))
            yield program.finding(rule, where, message, doubts=doubts(loader))


def _overlap(
    program: Walked,
    event: Event,
    loader: Value,
    made: Step,
    kept: list[tuple[Event, Value, Step]],
) -> str:
    """Return in words which other loop is open where an iterator is asked."""
    loop = event.step.loop
    if loop is not None and loop.sure and not made.is_in(loop):
        return (
            f"iterator of another loop goes on in the loop over {loop.text} at line "
            f"{loop.line}; a job cannot resume two loops at once"
        )
    for other, another, _ in kept if loop is None else ():
        if (
            another is not loader
            and _goes_on(program, event, other, another)
            and _goes_on(program, other, event, loader)
        ):
            return (
                "iterators of two elastic loaders are asked in turns: a job cannot "
                "resume two loops at once"
            )
    return ""


def _begun_anew(program: Walked, event: Event, made: Step) -> str:
    """Return in words what around an iterator does not know where it was."""
    if event.step.epoch is not made.epoch:
        return "iterator of an elastic loader kept over epochs"
    counted = {id(each.at) for each in program.events("counted")}
    for turn in event.turns:
        is_counting = id(turn) in counted or _counts(turn)
        if not isinstance(turn, ast.For) or not is_counting:
            continue
        if not any(node is made.node for node in ast.walk(turn)):
            return (
                "iterator of an elastic loader asked in the range() at line "
                f"{turn.lineno}, which begins anew after a restart"
            )
    return ""


def _goes_on(program: Walked, one: Event, other: Event, loader: Value) -> bool:
    """Return whether another loader's iterator may be asked next, not made anew."""
    remade = {
        event.step
        for event in program.events("iterated")
        if event.value is not None and loader in elastic_loaders_in(event.value)
    }
    reached = program.graph.forward([one.step], lambda step: step not in remade)
    return other.step in reached


ER002 = Rule(
    "ER002 W looks elastic, but the epoch loop is range()",
    help="write `for epoch in remaining_epochs_until(n):`",
)


def _ranges(program: Walked) -> Iterator[Finding]:
    counted = {id(event.at) for event in program.events("counted")}
    # What is around whole loops of epochs is no loop of epochs itself.
    seen = {turn for epoch in program.graph.epochs for turn in epoch.turns}
    for loop in program.graph.loops:
        if loop.loader.kind != "loader" or not loop.turns or not loop.sure:
            continue
        if loop.epoch is not None:
            continue
        turn = loop.turns[0]
        if turn in seen or not (_counts(turn) or id(turn) in counted):
            continue
        seen.add(turn)
        step = next(each for each in program.graph.steps if each.node is turn)
        message = (
            "epoch loop by `while`: a restart does not enter it where it was left"
            if isinstance(turn, ast.While)
            else "epoch loop over range(): every restart begins again at epoch 0"
        )
        yield program.finding(ER002, Spot(turn, step), message)
    asking = {turn for event in program.events("asked") for turn in event.turns}
    for event in program.events("trained", role="optimizer"):
        is_outside = event.step.epoch is None and event.step.loop is None
        if not (is_outside and event.registered and event.turns):
            continue
        if (turn := event.turns[0]) in seen or asking & set(event.turns):
            continue
        seen.add(turn)
        message = (
            "training loop without a boundary: it is never saved or stopped in its "
            "middle, and a restart begins it again"
        )
        step = next(each for each in program.graph.steps if each.node is turn)
        help_text = "loop over remaining_steps_until(n), or over a loader"
        yield program.finding(ER002, Spot(turn, step), message, help_text=help_text)


def _counts(turn: ast.AST) -> bool:
    if isinstance(turn, ast.While):
        return True
    text = written(turn.iter) if isinstance(turn, ast.For) else ""
    return "range(" in text or "count(" in text


CHECKS = (_bounds, _iterators, _ranges)
