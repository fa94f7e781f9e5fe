"""ER201 to ER211 and ER002: loops that cannot be replayed as they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, EpochLoop, Step
from elasticrun.lint.mending import bare_handler
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts

_UNCERTAIN = frozenset(("rank", "random", "time", "entropy"))


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER201 to ER211, but for ER209, and ER002."""
    yield from _nested(program)
    yield from _bounds(program)
    yield from _iterators(program)
    yield from _uncertain(program)
    yield from _handlers(program)
    yield from _plain(program)
    yield from _ranges(program)


def _step_of(program: Program, loop: DataLoop | EpochLoop) -> Step:
    return program.graph.steps[loop.head]


def _nested(program: Program) -> Iterator[Finding]:
    for epoch in program.walker.epochs:
        if epoch.outer is not None:
            message = f"epoch loop inside the epoch loop at line {epoch.outer.line}"
            step = _step_of(program, epoch)
            yield program.finding("ER201", epoch.node, step, message)
    for loop in program.walker.loops:
        outer = loop.outer
        if outer is not None and loop.is_elastic:
            message = (
                f"loop over {loop.text} inside the loop over {outer.text} at line "
                f"{outer.line}; a job has one position"
            )
            step = _step_of(program, loop)
            unsure = doubts(loop, outer)
            yield program.finding("ER204", loop.node, step, message, doubts=unsure)
    for event in program.events("loader_made"):
        if event.step.loop is not None:
            message = (
                f"loader created inside the loop over {event.step.loop.text} at line "
                f"{event.step.loop.line}"
            )
            yield program.finding("ER205", event.at, event.step, message)


def _bounds(program: Program) -> Iterator[Finding]:
    epochs = program.walker.epochs
    for second in epochs:
        step = _step_of(program, second)
        if second.turns and second.outer is None and _is_same_each_turn(second):
            if not _comes_again(program, second):
                continue
            turn = second.turns[-1]
            message = (
                "epoch loop inside the loop at line "
                f"{getattr(turn, 'lineno', 0)} with the same bound each time; the "
                "bound is a total, so only the first turn trains"
            )
            yield program.finding("ER206", second.node, step, message)
            continue
        for first in epochs:
            if first.number < second.number and _is_reached(program, first, second):
                message = (
                    "the bound of this epoch loop is a total, and the loop at line "
                    f"{first.line} reaches it already"
                )
                yield program.finding("ER206", second.node, step, message)
                break


def _comes_again(program: Program, epoch: EpochLoop) -> bool:
    """Return whether the loop around goes on after all epochs, not only to try again.

    An epoch loop that is entered again after an error continues where it was left.
    """
    turn = epoch.turns[-1]
    handlers = [each for each in ast.walk(turn) if isinstance(each, ast.ExceptHandler)]
    handled = {id(node) for handler in handlers for node in ast.walk(handler)}
    steps = program.graph.steps
    reached = program.graph.forward(
        [epoch.head], lambda step: id(step.node) not in handled
    )
    return any(steps[each].node is turn for each in reached)


def _is_same_each_turn(epoch: EpochLoop) -> bool:
    """Return whether nothing in the bound changes with the loop around."""
    if epoch.bound is None:
        return False
    changing: set[str] = set()
    for turn in epoch.turns:
        for node in ast.walk(turn):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                changing.add(node.id)
    names = {each.id for each in ast.walk(epoch.bound) if isinstance(each, ast.Name)}
    calls = any(isinstance(each, ast.Call) for each in ast.walk(epoch.bound))
    if calls or names & changing:
        return False
    is_inside = any(each is epoch.node for each in ast.walk(epoch.turns[-1]))
    return is_inside or not names & _local_names(epoch)


def _local_names(epoch: EpochLoop) -> set[str]:
    """Return the parameters and local names of the function around an epoch loop."""
    found: set[str] = set()
    for function in ast.walk(epoch.module.tree or ast.Module([], [])):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not function.lineno <= epoch.line <= (function.end_lineno or 0):
            continue
        for each in ast.walk(function):
            if isinstance(each, ast.arg):
                found.add(each.arg)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.add(each.id)
    return found


def _is_reached(program: Program, first: EpochLoop, second: EpochLoop) -> bool:
    if first.bound is None or second.bound is None or first.outer or second.outer:
        return False
    if second.head not in program.graph.forward([first.head], lambda _: True):
        return False
    known, value = first.bound_value, second.bound_value
    if known is not None and value is not None:
        if isinstance(known.data, int) and isinstance(value.data, int):
            return value.data <= known.data
        if first.node is second.node:
            return known is value and not (first.turns or second.turns)
    left, right = first.bound, second.bound
    same_scope = first.module is second.module and first.call == second.call
    return same_scope and ast.dump(left) == ast.dump(right)


def _iterators(program: Program) -> Iterator[Finding]:
    loaders_in = program.walker.loaders_in
    for event in program.events("zipped"):
        groups = [loaders_in(each) for each in event.data]
        elastic = [each for group in groups for each in group if each.kind == "loader"]
        if len(elastic) >= 2:
            message = "zip of elastic loaders: a job cannot resume two loops at once"
            yield program.finding("ER203", event.at, event.step, message)
    for event in program.events("next"):
        source = event.value
        node = event.at
        is_inline = (
            isinstance(node, ast.Call)
            and bool(node.args)
            and isinstance(node.args[0], ast.Call)
        )
        if source is None or source.kind != "iterator" or not is_inline:
            continue
        if any(each.kind == "loader" for each in loaders_in(source)):
            message = "next(iter(loader)) begins a loop and leaves it open"
            yield program.finding("ER204", event.at, event.step, message)
    for event in program.events("iterator_made"):
        if event.value is None or not _is_held(event.at, event.step):
            continue
        if any(each.kind == "loader" for each in loaders_in(event.value)):
            message = "iterator of an elastic loader held open"
            yield program.finding("ER207", event.at, event.step, message)


def _is_held(node: ast.AST, step: Step) -> bool:
    """Return whether an iterator is stored, not used up where it is made."""
    name = written(node.func) if isinstance(node, ast.Call) else ""
    if name.endswith("cycle"):
        return True
    statement = step.node
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    for each in ast.walk(statement):
        if isinstance(each, ast.Call) and node in each.args:
            inner = each.func
            if isinstance(inner, ast.Name) and inner.id == "next":
                return False
    return True


def _uncertain(program: Program) -> Iterator[Finding]:
    loops: list[DataLoop | EpochLoop] = [*program.walker.loops, *program.walker.epochs]
    for loop in loops:
        if isinstance(loop, DataLoop) and not loop.is_elastic:
            continue
        step = _step_of(program, loop)
        taints = frozenset().union(*(guard.taints for guard in step.guards))
        uncertain = taints & _UNCERTAIN
        if uncertain:
            message = f"whether this loop runs depends on {_words(uncertain)}"
            yield program.finding(
                "ER208", loop.node, step, message, doubts=doubts(loop)
            )
    for event in program.events("left"):
        left = event.data
        if left is None or (isinstance(left, DataLoop) and not left.is_elastic):
            continue
        head = _step_of(program, left)
        own = event.step.guards[len(head.guards) :]
        taints = frozenset().union(*(guard.taints for guard in own))
        uncertain = taints & _UNCERTAIN
        if uncertain:
            message = (
                f"whether the loop at line {left.line} goes on depends on "
                f"{_words(uncertain)}"
            )
            yield program.finding("ER208", event.at, event.step, message)


def _words(taints: frozenset[str]) -> str:
    words = {
        "rank": "the rank",
        "random": "a random draw",
        "time": "the time",
        "entropy": "what differs in each process",
    }
    return " and ".join(words[each] for each in sorted(taints))


def _handlers(program: Program) -> Iterator[Finding]:
    for event in program.events("suppressed_loop"):
        message = "suppress() swallows the stop, which leaves a loop as SystemExit"
        yield program.finding("ER210", event.at, event.step, message)
    for event in program.events("guarded_loop"):
        node = event.at
        assert isinstance(node, ast.Try)
        for handler in node.handlers:
            if _catches_stop(handler) and not _raises(handler):
                message = "handler swallows the stop, which leaves a loop as SystemExit"
                fix = bare_handler(handler, event.step.module)
                yield program.finding("ER210", handler, event.step, message, fix=fix)
        for statement in node.finalbody:
            if isinstance(statement, ast.Return | ast.Continue | ast.Break):
                message = "`finally` that leaves swallows the stop"
                yield program.finding("ER210", statement, event.step, message)


def _catches_stop(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {written(each).rpartition(".")[2] for each in kinds}
    return bool(names & {"BaseException", "SystemExit", "JobStopped"})


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(each, ast.Raise) for each in ast.walk(handler))


def _plain(program: Program) -> Iterator[Finding]:
    for loop in program.walker.loops:
        if loop.is_elastic or loop.epoch is None or loop.outer is not None:
            continue
        if any(each.sure for each in program.zones.loops_of(loop.epoch)):
            message = (
                f"loop over the plain DataLoader {loop.text} in an epoch with elastic "
                "loaders; a restart runs it from its start, on every replica"
            )
            step = _step_of(program, loop)
            yield program.finding("ER211", loop.node, step, message)


def _ranges(program: Program) -> Iterator[Finding]:
    if program.walker.epochs:
        return
    counted = {id(event.at) for event in program.events("counted")}
    seen: set[ast.AST] = set()
    for loop in program.walker.loops:
        if loop.loader.kind != "loader" or not loop.turns or not loop.sure:
            continue
        turn = loop.turns[0]
        if turn in seen or not (_counts(turn) or id(turn) in counted):
            continue
        seen.add(turn)
        step = next(each for each in program.graph.steps if each.node is turn)
        message = "epoch loop over range(): every restart begins again at epoch 0"
        yield program.finding("ER002", turn, step, message)


def _counts(turn: ast.AST) -> bool:
    if isinstance(turn, ast.While):
        return True
    text = written(turn.iter) if isinstance(turn, ast.For) else ""
    return "range(" in text or "count(" in text
