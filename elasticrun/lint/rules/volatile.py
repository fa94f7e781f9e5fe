"""ER301 and ER209, and in which order values are looked at."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, EpochLoop, Step, ValuePlace, Write
from elasticrun.lint.program import Walked, doubts, is_once
from elasticrun.lint.rules.left_over import left_over, numbered
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.sums import sums
from elasticrun.lint.rules.uses import PARTIAL, Uses, is_clock, is_creation
from elasticrun.lint.values import elastic_loaders_in

_EMPTY = "empty"  # In place of a constant: a container that is made without items.


def check(program: Walked) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    uses = Uses(program)
    carried: set[ValuePlace] = set()
    for epoch in program.graph.epochs:
        if program.zones.loops_of(epoch):
            yield from _carried(program, uses, epoch, carried)
    for head, inside, data_loop in _turns(program):
        yield from _carried_by(program, uses, head, inside, data_loop, carried)
    for loop in program.graph.loops:
        if loop.is_elastic:
            means: set[ValuePlace] = set()
            yield from sums(program, uses, loop, carried=carried, means=means)
            if not loop.is_inner:  # that is never continued in its middle, nor skipped
                yield from left_over(program, uses, loop, means)
                yield from numbered(program, uses, loop)
    yield from _left(program, uses, carried)


def _carried(
    program: Walked, uses: Uses, epoch: EpochLoop, carried: set[ValuePlace]
) -> Iterator[Finding]:
    inside = {step for step in program.graph.steps if step.epoch is epoch}
    for writes in _written(program, uses, inside).values():
        finding = _lost(program, uses, epoch, inside, writes, carried)
        if finding is not None:
            yield finding


def _written(
    program: Walked, uses: Uses, inside: set[Step]
) -> dict[ValuePlace, list[Write]]:
    """Return the plain places that some steps write and others read."""
    places: dict[ValuePlace, list[Write]] = {}
    for step in program.graph.steps:
        for write in step.writes if step in inside else ():
            # Of iterators ER203 and ER207 speak.
            is_iterator = write.value is not None and write.value.kind == "iterator"
            if write.how == "bind" or is_creation(write) or is_iterator:
                continue
            if uses.reads.get(write.place):
                places.setdefault(write.place, []).append(write)
    return {
        place: writes
        for place, writes in places.items()
        if uses.is_volatile(place) and not is_clock(writes)
    }


def _lost(
    program: Walked,
    uses: Uses,
    epoch: EpochLoop,
    inside: set[Step],
    writes: list[Write],
    carried: set[ValuePlace],
) -> Finding | None:
    """Return the finding of a place that keeps its value from one epoch to a later one.

    Its writes survive that reach the loop's head with no other value set on the way;
    exposed are the steps that may see such a value, coming from the head.
    """
    graph, place = program.graph, writes[0].place
    passes = uses.passing(place)
    within = uses.passing(place, inside)
    survivors = _survivors(uses, writes, epoch.step, inside)
    if not survivors:
        return None
    exposed = graph.forward([epoch.step], passes)
    reads = [each for each in uses.reads[place] if each.step in exposed]
    loudness = uses.loudness([r for r in reads if r.step in inside])
    is_kept = epoch.step in graph.forward([epoch.step], within)
    if not loudness and is_kept:
        loudness = uses.loudness(reads)
    if loudness:
        carried.add(place)
        return _lost_finding(program, epoch, survivors, loudness)
    if uses.loudness(reads):
        return _last_value(program, epoch, survivors[0])
    return None


def _survivors(
    uses: Uses, writes: list[Write], head: Step, inside: set[Step]
) -> list[Write]:
    """Return the writes in a turn whose values reach the next, if they are new ones."""
    place = writes[0].place
    within = uses.passing(place, inside)
    forward = uses.program.graph.forward
    found = [each for each in writes if head in forward([each.step], within)]
    first = [each for each in uses.writes[place] if each.step not in inside]
    return [] if _are_first_value(first, found) else found


def _are_first_value(first: list[Write], survivors: list[Write]) -> bool:
    """Return whether each turn leaves the constant that is set before the loop."""
    values = {_constant_of(each) for each in [*first, *survivors]}
    return bool(first) and len(values) == 1 and None not in values


def _constant_of(write: Write) -> str | None:
    value = write.value
    if write.how != "set":
        return None
    if value is None:
        return _EMPTY if write.place[1] == "[]" else None
    if value.kind == "const":
        return f"{type(value.constant)} {value.constant!r}"
    return _EMPTY if value.is_empty else None


ER301 = Rule(
    "ER301 W value lost at a restart",
    help="keep it in Variables (or in a State)",
)


def _lost_finding(
    program: Walked, epoch: EpochLoop, writes: list[Write], loudness: str
) -> Finding | None:
    write = max(writes, key=lambda each: (_rank(each), -each.step.number))
    if is_once(write.step):
        return None
    zone = program.zone(write.step)
    loop = program.zones.loops_of(epoch)[0]
    message = (
        f"`{write.name}` is changed in zone {zone} and read in a later epoch; a "
        "restart makes it again with its first value"
    )
    severity = "E" if loudness == "decides" else "W"
    return program.finding(
        ER301, write, message, loop=loop, severity=severity, doubts=doubts(loop)
    )


def _rank(write: Write) -> int:
    """Prefer a write that makes the new value from the old, then any computed one."""
    if write.how in PARTIAL:
        return 2
    is_constant = write.value is not None and write.value.kind == "const"
    return 0 if is_constant else 1


def _last_value(program: Walked, epoch: EpochLoop, write: Write) -> Finding:
    message = (
        f"`{write.name}` has the last epoch's value after the epochs; a job that is "
        "started again when all epochs are finished does not make it"
    )
    loop = program.zones.loops_of(epoch)[0]
    return program.finding(ER301, write, message, loop=loop, severity="H")


def _turns(program: Walked) -> Iterator[tuple[Step, set[Step], DataLoop | None]]:
    """Yield head, steps and loop of what has boundaries between its turns.

    Where batches are asked by `next`, the loop is None.
    """
    graph = program.graph
    for loop in graph.loops:
        if loop.is_elastic and loop.sure and not loop.outer:
            inside = {step for step in graph.steps if step.is_in(loop)}
            yield loop.step, inside, loop
    seen: set[ast.AST] = set()
    for event in program.events("asked"):
        if event.value is None or not event.turns or event.turns[-1] in seen:
            continue
        if event.step.epoch is not None or event.step.loop is not None:
            continue
        turn = event.turns[-1]
        seen.add(turn)
        if isinstance(turn, ast.While) and elastic_loaders_in(event.value):
            head = [each for each in graph.steps if each.node is turn][-1]
            inside = graph.forward([head]) & graph.backward([head])
            yield head, inside, None


def _carried_by(
    program: Walked,
    uses: Uses,
    head: Step,
    inside: set[Step],
    loop: DataLoop | None,
    carried: set[ValuePlace],
) -> Iterator[Finding]:
    """Yield plain values of one turn that decide something in a later one."""
    for place, writes in _written(program, uses, inside).items():
        survivors = _survivors(uses, writes, head, inside)
        if loop is not None and loop.epoch is not None:  # ER302 speaks of its sums.
            survivors = [each for each in survivors if each.how not in PARTIAL]
        if not survivors or place in carried:
            continue
        exposed = program.graph.forward([head], uses.passing(place, inside)) & inside
        reads = [each for each in uses.reads[place] if each.step in exposed]
        if uses.loudness(reads) != "decides":
            continue
        carried.add(place)
        write = max(survivors, key=lambda each: (_rank(each), -each.step.number))
        if is_once(write.step):
            continue
        message = (
            f"`{write.name}` is changed in the loop at line {head.line} "
            "and read in a later turn; a restart makes it again with its first value"
        )
        yield program.finding(ER301, write, message, loop=loop, severity="E")


ER209 = Rule(
    "ER209 W break of the epoch loop that is not remembered",
    help="keep what decides in Variables",
)


def _left(program: Walked, uses: Uses, carried: set[ValuePlace]) -> Iterator[Finding]:
    lost = uses.followed(carried)
    for event in program.events("left"):
        epoch = event.loop
        if not isinstance(epoch, EpochLoop):
            continue
        tests = {
            id(node)
            for guard in event.step.guards[len(epoch.step.guards) :]
            for node in ast.walk(guard.test)
        }
        for step in program.graph.steps:
            if step.epoch is not epoch:
                continue
            if any(r.place in lost and id(r.at) in tests for r in step.reads):
                message = (
                    "break of the epoch loop is decided by a value that a restart loses"
                )
                yield program.finding(ER209, event, message)
                break


CHECKS = (check,)
