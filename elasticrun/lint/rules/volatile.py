"""ER211, ER301, ER302, ER304, ER307: plain values that a restart loses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import (
    DataLoop,
    EpochLoop,
    Event,
    Read,
    Site,
    Step,
    ValuePlace,
    Write,
)
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, is_once
from elasticrun.lint.rules.dataflow import (
    PARTIAL,
    CarriedValue,
    Dataflow,
    LoopBody,
    steps_of,
)
from elasticrun.lint.values import Value, fields_of, sampling

ER211 = Rule(
    "ER211 W plain DataLoader trains in an elastic epoch",
    help="make it an AdaptiveDataLoader",
)
ER301 = Rule(
    "ER301 W value lost at a restart",
    help="keep it in Variables (or in a State)",
)
ER302 = Rule(
    "ER302 W sum over a loop covers only a part",
    help="keep it in an Accumulator; its synchronized() block adds the replicas up",
)
ER304 = Rule(
    "ER304 W index of enumerate used as a step",
    help="use loader.enumerate() or loader.batch_index",
)
ER307 = Rule(
    "ER307 W loop variable read after the loop",
    help="keep it in Variables or an Accumulator, or read it in the loop's body",
)


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    flow = Dataflow(program)
    lost: set[ValuePlace] = set()  # the places that ER301 has reported
    for body in _loop_bodies(program):
        for carried in flow.carried(body):
            if isinstance(body.loop, EpochLoop):
                yield from _over_epochs(flow, body, carried, lost)
            elif carried.place not in lost:
                yield from _over_batches(flow, body, carried, lost)
    yield from _behind(flow, lost)


def _loop_bodies(program: Program) -> Iterator[LoopBody]:
    """Yield the epochs, then the loops over loaders."""
    graph = program.graph
    for epoch in graph.epochs:
        if program.zones.loops_of(epoch):
            inside = {step for step in graph.steps if step.epoch is epoch}
            yield LoopBody(epoch.step, inside, epoch)
    for loop in graph.loops:
        if loop.is_elastic and not loop.outer:
            yield LoopBody(loop.step, steps_of(program, loop), loop)


def _over_epochs(
    flow: Dataflow, body: LoopBody, carried: CarriedValue, lost: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield the finding of a place whose value is read in a later epoch, or behind."""
    program, place = flow.program, carried.place
    assert isinstance(body.loop, EpochLoop)
    loop = program.zones.loops_of(body.loop)[0]
    reads = flow.seen_from(body, place, flow.reached(body.head, place))
    loudness = flow.loudness(each for each in reads if each.step in body.steps)
    if not loudness and body.head in flow.reached(body.head, place, body.steps):
        loudness = flow.loudness(reads)
    if not loudness:
        yield from _read_after(flow, body.loop, carried.survivors[0])
        return
    write = _telling(carried)
    if _ends_at_once(body, carried, reads, program):
        return
    lost.add(place)
    if is_once(write.step):
        return
    message = (
        f"`{write.name}` is changed in zone {program.zone(write.step)} and read in "
        "a later epoch; a restart sets it back to its first value"
    )
    severity = "E" if loudness == "decides" else "W"
    yield program.finding(ER301, write, message, loop=loop, severity=severity)


def _ends_at_once(
    body: LoopBody, carried: CarriedValue, reads: list[Read], program: Program
) -> bool:
    """Return whether a place is a flag that ends the epochs right behind its change."""
    last = max(each.step.number for each in carried.survivors)
    guards = [
        guard
        for event in program.events("left")
        if event.loop is body.loop
        for guard in event.step.guards
    ]
    leaving = {id(each.test) for each in guards if each.holds}
    return all(id(each.at) in leaving and each.step.number > last for each in reads)


def _over_batches(
    flow: Dataflow, body: LoopBody, carried: CarriedValue, lost: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield the finding of a place that decides something in a later iteration."""
    loop = body.loop
    assert not isinstance(loop, EpochLoop)
    in_epoch = loop.epoch is not None
    if in_epoch:  # ER302 speaks of its sums.
        plain = [each for each in carried.survivors if each.how not in PARTIAL]
        carried = carried._replace(survivors=plain)
    exposed = flow.reached(body.head, carried.place, body.steps) & body.steps
    loudness = flow.loudness(flow.seen_from(body, carried.place, exposed))
    # What is only shown is lost if it never begins anew.
    own = (each for each in flow.writes[carried.place] if each.step in body.steps)
    is_sum = not in_epoch and all(each.how in PARTIAL for each in own)
    is_seen = loudness == "decides" or (loudness == "shown" and is_sum)
    if not carried.survivors or not is_seen:
        return
    lost.add(carried.place)
    write = _telling(carried)
    if is_once(write.step):
        return
    message = (
        f"`{write.name}` is changed in the loop at line {body.head.line} and read in "
        "a later turn; a restart sets it back to its first value"
    )
    severity = "E" if loudness == "decides" else "W"
    yield flow.program.finding(ER301, write, message, loop=loop, severity=severity)


def _telling(carried: CarriedValue) -> Write:
    """Return the write that makes the new value from the old, else any computed one."""

    def order(write: Write) -> tuple[int, int]:
        if write.how in PARTIAL:
            return 2, -write.step.number
        is_constant = write.value is not None and write.value.kind == "const"
        return int(not is_constant), -write.step.number

    return max(carried.survivors, key=order)


_SETTING = re.compile(r"(?:^|[._])(?:un)?(?:freeze|enable|disable)")


def _in_one_epoch(program: Program) -> Iterator[Finding]:
    """Yield changes of what no state has that are made in one epoch only."""
    for event in program.events("set up", "trained"):
        text = event.text if event.what == "set up" else _set_by_apply(event)
        is_one = any(
            each.holds
            and "epoch" in each.taints
            and isinstance(each.test, ast.Compare)
            and isinstance(each.test.ops[0], ast.Eq)
            for each in event.step.guards
        )
        if not text or event.step.epoch is None or not is_one:
            continue
        if "finished_epochs" in event.step.module.text:
            continue  # by which each start may do it as well
        message = (
            f"`{text}` is changed in one epoch only, and is in no state: after a "
            "restart in a later epoch it is as it was before"
        )
        help_text = "test the epoch with >= or <, so that each epoch sets it"
        yield program.finding(ER301, event, message, help_text=help_text)


def _set_by_apply(event: Event) -> str:
    """Return the function that `apply` is given, if it sets how modules train."""
    if event.name != "apply" or not isinstance(event.at, ast.Call):
        return ""
    given = map(written, event.at.args)
    return next((text for text in given if _SETTING.search(text)), "")


_STATES = re.compile(r"bit_generator|[gs]et_?state\b")  # which a program keeps by hand


def _generators(program: Program) -> Iterator[Finding]:
    """Yield generators from before the epochs that draw in them."""
    seeds = program.events("seeded")
    seen = [each.value for each in seeds if each.step.epoch or each.step.loop]
    yield from _of_data(program, seen)
    for event in program.events("drawn"):
        own, zone = event.value, program.zone(event.step)
        if own is None or own in seen or own.made_at < 0 or zone in ("", "P", "D"):
            continue
        made = program.made(own)
        own_seeds = [Site(each.at, each.step) for each in seeds if each.value is own]
        at = own_seeds[0] if own_seeds else made
        is_kept = own.registered or own.is_handed_on
        if is_kept or _STATES.search(made.step.module.text):
            continue
        if program.zone(at.step) == "P":
            seen.append(own)
            message = (
                f"this generator draws in zone {zone} (line {event.step.line}), and is "
                "in no state: a restart begins with a new one"
            )
            yield program.finding(ER301, at, message)


def _of_data(program: Program, seen: list[Value | None]) -> Iterator[Finding]:
    """Yield generators from which data sets draw what is in their samples."""
    for event in program.events("made", role="loader"):
        collate = event.given.keywords.get("collate_fn")
        makers = [*event.given.args[:1], *([collate] if collate is not None else [])]
        for own in dict.fromkeys(_drawn_by(makers)):
            if own not in seen and not own.registered:
                seen.append(own)
                message = (
                    "a data set draws from this generator, which is in no state: "
                    "workers and replicas draw the same, and a restart repeats its "
                    "first draws"
                )
                help_text = "draw from a global generator, seeded for each batch"
                yield program.finding(
                    ER301, program.made(own), message, help_text=help_text
                )


def _drawn_by(objects: Iterable[Value], depth: int = 3) -> Iterator[Value]:
    """Yield the generators that make samples in data sets and what these have."""
    for each in objects:
        for method in sampling(each):
            values = [each.attrs[x] for x in fields_of(method) & each.attrs.keys()]
            names = [node.id for node in ast.walk(method) if isinstance(node, ast.Name)]
            if each.cls is not None:
                values += [each.cls.frame.look_up(name)[0] for name in names]
            yield from (value for value in values if value.kind == "rng")
        if depth:
            inner = (*each.attrs.values(), *each.parts)
            yield from _drawn_by([e for e in inner if e.is_object], depth - 1)


# Behind loops.


def _behind(flow: Dataflow, lost: set[ValuePlace]) -> Iterator[Finding]:
    """Yield what is read behind loops, but for the places that ER301 has reported."""
    for loop in flow.program.graph.loops:
        if not loop.is_elastic:
            yield from _plain(flow, loop)
            continue
        inside = steps_of(flow.program, loop)
        for write in flow.first_writes(loop, PARTIAL):
            seeing = flow.reached(loop.step, write.place, inside)
            if write.place not in lost and write.step in seeing:
                yield from _summed(flow, loop, write)
        if not loop.is_inner:  # that is never continued in its middle, nor skipped
            for write in flow.first_writes(loop, ("set", "target")):
                yield from _read_after(flow, loop, write)
            yield from _numbered(flow, loop)


def _summed(flow: Dataflow, loop: DataLoop, write: Write) -> Iterator[Finding]:
    """Yield a sum in plain memory that is read behind its loop, or its mean."""
    own = _means_of(flow, loop, write.place)
    reads = [
        read
        for place, step in {write.place: write.step, **own}.items()
        for read in flow.reads_behind(loop, place, step)
    ]
    loudness = flow.loudness(reads)
    if not loudness:
        return
    message = (
        f"`{write.name}` is a plain sum over a loop: it has only this replica's part"
        f"{'' if loop.is_inner else ' since the last restart'}"
    )
    is_own = write.value is not None and "batch" in write.value.taints
    is_loud = is_own or loudness == "decides"
    yield flow.program.finding(
        ER302,
        flow.program.called_at(write, loop.step.call),
        message,
        loop=loop,
        severity="W" if is_loud else "H",
    )


def _means_of(
    flow: Dataflow, loop: DataLoop, place: ValuePlace
) -> dict[ValuePlace, Step]:
    """Return what a loop's body makes of a sum and keeps, as in `avg = sum / count`."""
    return {
        target: read.step
        for read in flow.reads.get(place, ())
        if read.step.loop is loop
        for target in read.sink.places
        if target != place and flow.is_volatile(target)
    }


def _read_after(
    flow: Dataflow, loop: DataLoop | EpochLoop, write: Write
) -> Iterator[Finding]:
    program, place = flow.program, write.place
    data_loop = loop if isinstance(loop, DataLoop) else None
    is_name = place[0] not in program.walk.bases
    is_unset = is_name and all(each.step.is_in(loop) for each in flow.writes[place])
    # A generator that hands out the last batch behind its loop runs the body there.
    bodies = {read.at for read in flow.reads.get(place, ()) if read.step.is_in(loop)}
    reads = [
        read
        for read in flow.reads_behind(loop, place, write.step)
        if read.at not in bodies
        and (data_loop is None or read.step.epoch is loop.epoch)
        and (flow.loudness([read]) or (data_loop is None and is_unset))
    ]
    if not reads or place[1] == "[]":
        return
    first = min(reads, key=lambda each: each.step.number)
    message = (
        f"`{write.name}` is set in the loop at {program.zones.where(loop, first.step)} "
        "and read after it; a restart skips the loop if it was finished"
    )
    yield program.finding(ER307, first, message, loop=data_loop)


def _numbered(flow: Dataflow, loop: DataLoop) -> Iterator[Finding]:
    """Yield uses of an enumerate index as the number of a step."""
    for write in flow.first_writes(loop, ("target",)):
        value = write.value
        if value is None or value.kind != "unknown" or "enumerated" not in value.taints:
            continue
        reads = [
            read
            for read in flow.leads_to(flow.reads.get(write.place, ()))
            if read.sink.kind in ("track", "optimizer", "save", "test")
        ]
        if reads:
            message = (
                f"`{write.name}` counts from 0 again when the interrupted loop "
                f"continues, and is used as a step at line {reads[0].step.line}"
            )
            yield flow.program.finding(ER304, write, message)


def _plain(flow: Dataflow, loop: DataLoop) -> Iterator[Finding]:
    """Yield the loop over a plain loader that trains in an epoch."""
    program, graph, epoch = flow.program, flow.program.graph, loop.epoch
    if epoch is None or loop.outer is not None or is_once(loop.step):
        return

    def is_within(step: Step) -> bool:
        return step is not epoch.step

    inside = graph.forward([loop.step], is_within)
    inside &= graph.backward([loop.step], is_within)
    # What all replicas add to an Accumulator is added so many times.
    noted = program.events("trained", "backward", "added")
    if any(event.step in inside for event in noted):
        made = program.made(loop.loader)
        own = (each for each in (made, loop) if each.step.module is program.walk.root)
        message = (
            f"the loop over the plain DataLoader {loop.text} trains in an elastic "
            "epoch: every replica gets all its samples, and a restart begins with the "
            "first"
        )
        yield program.finding(ER211, next(own, made), message)


CHECKS = (check, _generators, _in_one_epoch)
