"""ER301, ER302, ER304, ER307, ER209, ER202: values that a restart loses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Fix
from elasticrun.lint.graph import DataLoop, EpochLoop, Place, Read, Write
from elasticrun.lint.mending import true_enumerate
from elasticrun.lint.program import Program, doubts, is_once
from elasticrun.lint.rules.uses import Uses

_PARTIAL = ("update", "grow")


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    uses = Uses(program)
    carried: set[Place] = set()
    for epoch in program.walker.epochs:
        if program.zones.loops_of(epoch):
            yield from _carried(program, uses, epoch, carried)
    for loop in program.walker.loops:
        if loop.is_elastic:
            yield from _sums(program, uses, loop, carried)
            yield from _left_over(program, uses, loop)
            yield from _numbered(program, uses, loop)
    yield from _emptied(program)
    yield from _left(program, carried)


# ER301.


def _carried(
    program: Program, uses: Uses, epoch: EpochLoop, carried: set[Place]
) -> Iterator[Finding]:
    steps = [step for step in program.graph.steps if step.epoch is epoch]
    places: dict[Place, list[Write]] = {}
    for step in steps:
        for write in step.writes:
            if write.how != "bind" and uses.reads.get(write.place):
                places.setdefault(write.place, []).append(write)
    for place, writes in places.items():
        if uses.is_volatile(place) and not _is_clock(writes):
            finding = _lost(program, uses, epoch, place, writes, carried)
            if finding is not None:
                yield finding


def _is_clock(writes: list[Write]) -> bool:
    """Return whether a place only ever holds the time."""
    return all(
        write.value is not None and write.value.taints == frozenset(("time",))
        for write in writes
    )


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
    if not survivors:
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


def _lost_finding(
    program: Program, epoch: EpochLoop, writes: list[Write], loudness: str
) -> Finding | None:
    write = max(writes, key=lambda each: (_rank(each), -each.step.number))
    if is_once(write.step):
        return None
    zone = program.zone(write.step)
    loop = program.zones.loops_of(epoch)[0]
    message = (
        f"`{write.name}` is changed in zone {zone} and read in a later epoch; a restart "
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
    if write.how in _PARTIAL:
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


# ER302 and ER202.


def _sums(
    program: Program, uses: Uses, loop: DataLoop, carried: set[Place]
) -> Iterator[Finding]:
    seen: set[Place] = set()
    for step in program.graph.steps:
        if step.loop is not loop:
            continue
        for write in step.writes:
            place = write.place
            if write.how not in _PARTIAL or place in seen or place in carried:
                continue
            seen.add(place)
            if not uses.is_volatile(place):
                continue
            reached = uses.reached(step, place)
            reads = [
                each
                for each in uses.reads[place]
                if each.step.loop is not loop and each.step.number in reached
            ]
            loudness = uses.loudness(reads)
            if loudness:
                yield _partial(program, loop, write, loudness)


def _partial(program: Program, loop: DataLoop, write: Write, loudness: str) -> Finding:
    outside = loop.epoch is None
    message = (
        f"`{write.name}` is summed over a loop in plain memory: it covers only this "
        "process's part since the last restart"
    )
    severity = "W" if loudness == "decides" and not outside else "H"
    return program.finding(
        "ER202" if outside else "ER302",
        write.at,
        write.step,
        message,
        loop=loop,
        severity=severity,
        doubts=doubts(loop),
    )


def _emptied(program: Program) -> Iterator[Finding]:
    """Yield saved sums that replayed code sets back while a loop may hold a part."""
    summed = {
        (event.value.uid, event.data[1], event.step.epoch)
        for event in program.events("durable_update")
        if event.value is not None
        and event.data[0] != "Set"
        and program.zone(event.step) == "L"
    }
    for event in program.events("durable_update"):
        if event.data[0] != "Set" or event.value is None:
            continue
        if (event.value.uid, event.data[1], event.step.epoch) not in summed:
            continue
        loop = program.replayed(event)
        if loop is None:
            continue
        message = (
            f"`{event.data[2]}` is set back in zone {program.zone(event.step)}; a "
            f"restart during the loop at {program.zones.where(loop, event.step)} does "
            "it again and loses the part that was saved"
        )
        yield program.finding(
            "ER302",
            event.at,
            event.step,
            message,
            loop=loop,
            severity="W",
            doubts=doubts(loop),
            help_text="set it back in zone C, after it was read",
        )


# ER307.


def _left_over(program: Program, uses: Uses, loop: DataLoop) -> Iterator[Finding]:
    seen: set[Place] = set()
    for step in program.graph.steps:
        if step.loop is not loop:
            continue
        for write in step.writes:
            place = write.place
            if write.how not in ("set", "target") or place in seen:
                continue
            seen.add(place)
            if not uses.reads.get(place) or not uses.is_volatile(place):
                continue
            if place[1] == "[]" or _is_clock([write]):
                continue
            yield from _read_after(program, uses, loop, write)


def _read_after(
    program: Program, uses: Uses, loop: DataLoop, write: Write
) -> Iterator[Finding]:
    outside = [r for r in uses.reads[write.place] if r.step.loop is not loop]
    if not outside or any(w.how in _PARTIAL for w in uses.writes[write.place]):
        return
    reached = uses.reached(write.step, write.place)
    reads = [read for read in outside if read.step.number in reached]
    reads = [read for read in reads if uses.loudness([read])]
    reads = [read for read in reads if read.step.epoch is loop.epoch]
    if not reads:
        return
    first = min(reads, key=lambda each: each.step.number)
    message = (
        f"`{write.name}` is set in the loop at {program.zones.where(loop, first.step)} "
        "and read after it; a loop that was finished before a restart sets nothing"
    )
    made_before = any(
        each.step.loop is not loop and each.how == "set"
        for each in uses.writes[write.place]
    )
    only_shown = uses.loudness(reads) != "decides"
    yield program.finding(
        "ER307",
        first.at,
        first.step,
        message,
        loop=loop,
        doubts=doubts(loop) + int(made_before and only_shown),
    )


# ER304.


def _numbered(program: Program, uses: Uses, loop: DataLoop) -> Iterator[Finding]:
    seen: set[Place] = set()
    for step in program.graph.steps:
        if step.loop is not loop:
            continue
        for write in step.writes:
            value = write.value
            is_index = value is not None and "enumerated" in value.taints
            if write.how != "target" or not is_index or write.place in seen:
                continue
            if value is None or value.kind != "unknown":
                continue
            seen.add(write.place)
            read = _as_step(uses, write.place, set())
            if read is not None:
                message = (
                    f"`{write.name}` counts from 0 again when the interrupted loop "
                    f"continues, and is used as a step of the loop at line {loop.line}"
                )
                yield program.finding(
                    "ER304",
                    read.at,
                    read.step,
                    message,
                    doubts=doubts(loop),
                    fix=_true_enumerate(loop, read),
                )


def _true_enumerate(loop: DataLoop, read: Read) -> Fix | None:
    """Return the fix of the loop's head, where index and loop stand in one module."""
    if loop.module is not read.step.module or loop.loader.kind != "loader":
        return None
    return true_enumerate(loop.node, loop.module)


def _as_step(uses: Uses, place: Place, seen: set[Place]) -> Read | None:
    """Return a reading of an index that depends on its being the true one."""
    for read in uses.reads.get(place, []):
        kind = read.sink.kind
        if kind in ("track", "optimizer", "save"):
            return read
        if kind == "test" and not _guards_optimizer(read):
            return read
        if kind == "flow":
            for target in read.sink.places:
                if target not in seen:
                    seen.add(target)
                    if _as_step(uses, target, seen) is not None:
                        return read
    return None


def _guards_optimizer(read: Read) -> bool:
    """Return whether a test is about gradient accumulation, which is ER305."""
    statement = read.step.node
    return isinstance(statement, ast.If) and any(
        isinstance(each, ast.Attribute) and each.attr in ("step", "no_sync")
        for each in ast.walk(statement)
    )


# ER209.


def _left(program: Program, carried: set[Place]) -> Iterator[Finding]:
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
            if any(r.place in carried and id(r.at) in tests for r in step.reads):
                message = (
                    "break of the epoch loop is decided by a value that a restart loses"
                )
                yield program.finding("ER209", event.at, event.step, message)
                break
