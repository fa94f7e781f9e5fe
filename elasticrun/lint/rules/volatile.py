"""ER301 and ER209, and in which order values are looked at."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import EpochLoop, Place, Write
from elasticrun.lint.program import Program, doubts, is_once
from elasticrun.lint.rules.left_over import left_over, numbered
from elasticrun.lint.rules.sums import emptied, sums
from elasticrun.lint.rules.uses import PARTIAL, Uses, is_clock, is_creation
from elasticrun.lint.values import EMPTY


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    uses = Uses(program)
    carried: set[Place] = set()
    for epoch in program.walker.epochs:
        if program.zones.loops_of(epoch):
            yield from _carried(program, uses, epoch, carried)
    for loop in program.walker.loops:
        if loop.is_elastic:
            means: set[Place] = set()
            yield from sums(program, uses, loop, carried=carried, means=means)
            yield from left_over(program, uses, loop, means)
            yield from numbered(program, uses, loop)
    yield from emptied(program)
    yield from _left(program, uses, carried)


def _carried(
    program: Program, uses: Uses, epoch: EpochLoop, carried: set[Place]
) -> Iterator[Finding]:
    steps = [step for step in program.graph.steps if step.epoch is epoch]
    places: dict[Place, list[Write]] = {}
    for step in steps:
        for write in step.writes:
            if write.how == "bind" or is_creation(write):
                continue
            if uses.reads.get(write.place):
                places.setdefault(write.place, []).append(write)
    for place, writes in places.items():
        if uses.is_volatile(place) and not is_clock(writes):
            finding = _lost(program, uses, epoch, place, writes, carried)
            if finding is not None:
                yield finding


def _lost(
    program: Program,
    uses: Uses,
    epoch: EpochLoop,
    place: Place,
    writes: list[Write],
    carried: set[Place],
) -> Finding | None:
    killers = uses.killers_of_epochs(place)
    graph = program.graph

    def passes(step: object) -> bool:
        return getattr(step, "number", -1) not in killers

    def passes_inside(step: object) -> bool:
        return passes(step) and getattr(step, "epoch", None) is epoch

    survivors = [
        write
        for write in writes
        if epoch.head in graph.forward([write.step.number], passes_inside)
    ]
    if not survivors or _are_first_value(uses, epoch, place, survivors):
        return None
    exposed = graph.forward([epoch.head], passes)
    reads = [each for each in uses.reads[place] if each.step.number in exposed]
    inside = [each for each in reads if each.step.epoch is epoch]
    loudness = uses.loudness(inside)
    is_kept = epoch.head in graph.forward([epoch.head], passes_inside)
    if not loudness and is_kept:
        loudness = uses.loudness(reads)
    if loudness:
        carried.add(place)
        return _lost_finding(program, epoch, survivors, loudness)
    if uses.loudness(reads):
        return _last_value(program, epoch, survivors[0])
    return None


def _are_first_value(
    uses: Uses, epoch: EpochLoop, place: Place, survivors: list[Write]
) -> bool:
    """Return whether an epoch leaves what the code before all epochs sets too."""
    first = [each for each in uses.writes[place] if each.step.epoch is not epoch]
    values = {_constant_of(each) for each in [*first, *survivors]}
    return bool(first) and len(values) == 1 and None not in values


def _constant_of(write: Write) -> str | None:
    value = write.value
    if write.how != "set":
        return None
    if value is None:
        return EMPTY if write.place[1] == "[]" else None
    if value.kind == "const":
        return f"{type(value.data)} {value.data!r}"
    return EMPTY if value.data == EMPTY else None


def _lost_finding(
    program: Program, epoch: EpochLoop, writes: list[Write], loudness: str
) -> Finding | None:
    write = max(writes, key=lambda each: (_rank(each), -each.step.number))
    if is_once(write.step):
        return None
    zone = program.zone(write.step)
    loop = program.zones.loops_of(epoch)[0]
    message = (
        f"`{write.name}` is changed in zone {zone} and read in a later epoch; a "
        f"restart "
        "makes it again with its first value"
    )
    severity = "E" if loudness == "decides" else "W"
    return program.finding(
        "ER301",
        write.at,
        write.step,
        message,
        loop=loop,
        severity=severity,
        doubts=doubts(loop),
    )


def _rank(write: Write) -> int:
    """Prefer a write that makes the new value from the old, then any computed one."""
    if write.how in PARTIAL:
        return 2
    is_constant = write.value is not None and write.value.kind == "const"
    return 0 if is_constant else 1


def _last_value(program: Program, epoch: EpochLoop, write: Write) -> Finding:
    message = (
        f"`{write.name}` has the last epoch's value after the epochs; a job that is "
        "started again when all epochs are finished does not make it"
    )
    loop = program.zones.loops_of(epoch)[0]
    return program.finding(
        "ER301", write.at, write.step, message, loop=loop, severity="H"
    )


def _left(program: Program, uses: Uses, carried: set[Place]) -> Iterator[Finding]:
    lost = uses.followed(carried)
    for event in program.events("left"):
        if not isinstance(event.data, EpochLoop):
            continue
        tests = {
            id(node)
            for guard in event.step.guards[len(event.data.guards) :]
            for node in ast.walk(guard.test)
        }
        for step in program.graph.steps:
            if step.epoch is not event.data:
                continue
            if any(r.place in lost and id(r.at) in tests for r in step.reads):
                message = (
                    "break of the epoch loop is decided by a value that a restart loses"
                )
                yield program.finding("ER209", event.at, event.step, message)
                break
