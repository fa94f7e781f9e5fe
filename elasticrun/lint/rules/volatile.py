"""ER209, ER301: plain values, generators and settings that a restart loses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import EpochLoop, Read, Site, ValuePlace, Write
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts, is_once
from elasticrun.lint.rules.dataflow import (
    PARTIAL,
    CarriedValue,
    Dataflow,
    Turns,
    steps_of,
)
from elasticrun.lint.rules.left_over import behind
from elasticrun.lint.values import Value, elastic_loaders_in, fields_of, sampling

ER209 = Rule(
    "ER209 W break of the epoch loop that is not remembered",
    help="keep what decides in Variables",
)
ER301 = Rule(
    "ER301 W value lost at a restart",
    help="keep it in Variables (or in a State)",
)


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    flow = Dataflow(program)
    lost: set[ValuePlace] = set()  # the places that ER301 has reported
    for turns in _turns(program):
        for carried in flow.carried(turns):
            if isinstance(turns.loop, EpochLoop):
                yield from _over_epochs(flow, turns, carried, lost)
            elif carried.place not in lost:
                yield from _over_turns(flow, turns, carried, lost)
    yield from behind(flow, lost)
    yield from _ahead(flow)
    yield from _left(flow, lost)


def _turns(program: Program) -> Iterator[Turns]:
    """Yield the epochs, then the loops over loaders."""
    graph = program.graph
    for epoch in graph.epochs:
        if program.zones.loops_of(epoch):
            inside = {step for step in graph.steps if step.epoch is epoch}
            yield Turns(epoch.step, inside, epoch)
    for loop in graph.loops:
        if loop.is_elastic and loop.sure and not loop.outer:
            yield Turns(loop.step, steps_of(program, loop), loop)


def _over_epochs(
    flow: Dataflow, turns: Turns, carried: CarriedValue, lost: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield the finding of a place whose value is read in a later epoch, or behind."""
    program, place = flow.program, carried.place
    assert isinstance(turns.loop, EpochLoop)
    loop = program.zones.loops_of(turns.loop)[0]
    reads = flow.seen_from(turns, place, flow.reached(turns.head, place))
    loudness = flow.loudness(each for each in reads if each.step in turns.inside)
    if not loudness and turns.head in flow.reached(turns.head, place, turns.inside):
        loudness = flow.loudness(reads)
    if loudness:
        write = _telling(carried)
        if _ends_at_once(turns, carried, reads, program):
            return
        lost.add(place)
        if is_once(write.step):
            return
        message = (
            f"`{write.name}` is changed in zone {program.zone(write.step)} and read in "
            "a later epoch; a restart sets it back to its first value"
        )
        severity, unsure = "E" if loudness == "decides" else "W", doubts(loop)
    elif flow.loudness(each for each in reads if each.step in program.zones.between):
        write, severity, unsure = carried.survivors[0], "W", 0
        message = (
            f"`{write.name}` is set in the epochs and read after them; a job that "
            "restarts when all epochs are finished never sets it"
        )
    else:
        return
    yield program.finding(
        ER301, write, message, loop=loop, severity=severity, doubts=unsure
    )


def _ends_at_once(
    turns: Turns, carried: CarriedValue, reads: list[Read], program: Program
) -> bool:
    """Return whether a place is a flag that ends the epochs right behind its change."""
    last = max(each.step.number for each in carried.survivors)
    guards = [
        guard
        for event in program.events("left")
        if event.loop is turns.loop
        for guard in event.step.guards
    ]
    leaving = {id(each.test) for each in guards if each.holds}
    return all(id(each.at) in leaving and each.step.number > last for each in reads)


def _over_turns(
    flow: Dataflow, turns: Turns, carried: CarriedValue, lost: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield the finding of a place that decides something in a later turn."""
    loop = turns.loop
    assert not isinstance(loop, EpochLoop)
    in_epoch = loop.epoch is not None
    if in_epoch:  # ER302 speaks of its sums.
        plain = [each for each in carried.survivors if each.how not in PARTIAL]
        carried = carried._replace(survivors=plain)
    exposed = flow.reached(turns.head, carried.place, turns.inside) & turns.inside
    loudness = flow.loudness(flow.seen_from(turns, carried.place, exposed))
    # What is only shown is lost if it never begins anew.
    own = (each for each in flow.writes[carried.place] if each.step in turns.inside)
    is_sum = not in_epoch and all(each.how in PARTIAL for each in own)
    is_seen = loudness == "decides" or (loudness == "shown" and is_sum)
    if not carried.survivors or not is_seen:
        return
    lost.add(carried.place)
    write = _telling(carried)
    if is_once(write.step):
        return
    message = (
        f"`{write.name}` is changed in the loop at line {turns.head.line} and read in "
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


def _left(flow: Dataflow, lost: set[ValuePlace]) -> Iterator[Finding]:
    reads = [read for place in lost for read in flow.reads.get(place, ())]
    deciding = {read.at for read in flow.leads_to(reads)}
    for event in flow.program.events("left"):
        if not isinstance(event.loop, EpochLoop):
            continue
        guards = event.step.guards[len(event.loop.step.guards) :]
        tests = {node for guard in guards for node in ast.walk(guard.test)}
        if tests & deciding:
            message = "a value that a restart loses decides about this break"
            yield flow.program.finding(ER209, event, message)


def _ahead(flow: Dataflow) -> Iterator[Finding]:
    """Yield batches that a prefetcher hands out once it has asked for the next ones."""
    program = flow.program
    asking = {e.step for e in program.graph.loops if e.is_elastic and e.sure}
    asking |= {
        event.step
        for event in program.events("asked")
        if event.value is not None and elastic_loaders_in(event.value)
    }
    told: set[int] = set()  # Calls: one name of each is enough.
    for place, reads in flow.reads.items() if asking else ():
        given = {each.step for each in reads if _hands_out(each.step.node)}
        for write in flow.writes[place] if given and place[0] not in told else ():
            origins = [e for r in write.step.reads for e in flow.writes[r.place]]
            values = (each.value for each in [write, *origins])
            is_batch = any(each and "batch" in each.taints for each in values)
            if not is_batch or not _is_plain(write.step.node):
                continue
            later = (asking - {write.step}) & flow.reached(write.step, place)
            if any(given & flow.reached(each, place) for each in later):
                message = (
                    f"`{write.name}` is handed out once the next batch was asked for, "
                    "so it counts as trained before it is; a restart loses it"
                )
                help_text = "let the loader read ahead: num_workers=, device="
                yield program.finding(ER301, write, message, help_text=help_text)
                told.add(place[0])
                break


def _hands_out(node: ast.AST) -> bool:
    return isinstance(node, ast.Return | ast.Yield) or isinstance(
        getattr(node, "value", None), ast.Yield
    )


def _is_plain(node: ast.AST) -> bool:
    """Return whether a statement gives a name to something that has one."""
    match node:
        case ast.Assign(_, ast.Name() | ast.Attribute()):
            return True
        case ast.Assign(_, ast.Tuple(parts)):
            return all(isinstance(each, ast.Name | ast.Attribute) for each in parts)
    return False


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
    if event.how != "apply" or not isinstance(event.at, ast.Call):
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


CHECKS = (check, _generators, _in_one_epoch)
