"""ER301 and ER209: plain values that later epochs or turns read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import EpochLoop, ValuePlace, Write
from elasticrun.lint.program import Walked, doubts, is_once
from elasticrun.lint.rules.dataflow import PARTIAL, Carried, Dataflow, Turns, steps_of
from elasticrun.lint.rules.left_over import behind
from elasticrun.lint.values import Value, elastic_loaders_in


def check(program: Walked) -> Iterator[Finding]:
    """Yield the findings about volatile values."""
    flow = Dataflow(program)
    lost: set[ValuePlace] = set()  # the places that ER301 has reported
    for turns in _turns(program):
        for carried in flow.carried(turns):
            if isinstance(turns.loop, EpochLoop):
                yield from _over_epochs(flow, turns.loop, turns, carried, lost)
            elif carried.place not in lost:
                yield from _over_turns(flow, turns, carried, lost)
    yield from behind(flow, lost)
    yield from _left(flow, lost)


def _turns(program: Walked) -> Iterator[Turns]:
    """Yield the epochs, then the loops over loaders, then those that ask by `next`."""
    graph = program.graph
    for epoch in graph.epochs:
        if program.zones.loops_of(epoch):
            inside = {step for step in graph.steps if step.epoch is epoch}
            yield Turns(epoch.step, inside, epoch)
    for loop in graph.loops:
        if loop.is_elastic and loop.sure and not loop.outer:
            yield Turns(loop.step, steps_of(program, loop), loop)
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
            yield Turns(head, graph.forward([head]) & graph.backward([head]), None)


ER301 = Rule(
    "ER301 W value lost at a restart",
    help="keep it in Variables (or in a State)",
)


def _over_epochs(
    flow: Dataflow,
    epoch: EpochLoop,
    turns: Turns,
    carried: Carried,
    lost: set[ValuePlace],
) -> Iterator[Finding]:
    """Yield the finding of a place whose value a later epoch reads."""
    program, place = flow.program, carried.place
    exposed = flow.reached(turns.head, place)
    reads = flow.seen_from(turns, place, exposed)
    loudness = flow.loudness(each for each in reads if each.step in turns.inside)
    if not loudness and turns.head in flow.reached(turns.head, place, turns.inside):
        loudness = flow.loudness(reads)
    loop = program.zones.loops_of(epoch)[0]
    if loudness:
        lost.add(place)
        write = _telling(carried)
        message = (
            f"`{write.name}` is changed in zone {program.zone(write.step)} and read in "
            "a later epoch; a restart makes it again with its first value"
        )
        severity, unsure = "E" if loudness == "decides" else "W", doubts(loop)
    elif flow.loudness(reads):
        write = carried.survivors[0]
        message = (
            f"`{write.name}` has the last epoch's value after the epochs; a job that "
            "is started again when all epochs are finished does not make it"
        )
        severity, unsure = "H", 0
    else:
        return
    if severity == "H" or not is_once(write.step):
        yield program.finding(
            ER301, write, message, loop=loop, severity=severity, doubts=unsure
        )


def _over_turns(
    flow: Dataflow, turns: Turns, carried: Carried, lost: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield the finding of a place that decides something in a later turn."""
    loop = turns.loop
    if loop is not None and loop.epoch is not None:  # ER302 speaks of its sums.
        plain = [each for each in carried.survivors if each.how not in PARTIAL]
        carried = carried._replace(survivors=plain)
    exposed = flow.reached(turns.head, carried.place, turns.inside) & turns.inside
    reads = flow.seen_from(turns, carried.place, exposed)
    if not carried.survivors or flow.loudness(reads) != "decides":
        return
    lost.add(carried.place)
    write = _telling(carried)
    if is_once(write.step):
        return
    message = (
        f"`{write.name}` is changed in the loop at line {turns.head.line} "
        "and read in a later turn; a restart makes it again with its first value"
    )
    assert not isinstance(loop, EpochLoop)
    yield flow.program.finding(ER301, write, message, loop=loop, severity="E")


def _telling(carried: Carried) -> Write:
    """Return the write that makes the new value from the old, else any computed one."""

    def order(write: Write) -> tuple[int, int]:
        if write.how in PARTIAL:
            return 2, -write.step.number
        is_constant = write.value is not None and write.value.kind == "const"
        return int(not is_constant), -write.step.number

    return max(carried.survivors, key=order)


ER209 = Rule(
    "ER209 W break of the epoch loop that is not remembered",
    help="keep what decides in Variables",
)


def _left(flow: Dataflow, lost: set[ValuePlace]) -> Iterator[Finding]:
    program, deciding = flow.program, flow.followed(lost)
    for event in program.events("left"):
        epoch = event.loop
        if not isinstance(epoch, EpochLoop):
            continue
        tests = {
            id(node)
            for guard in event.step.guards[len(epoch.step.guards) :]
            for node in ast.walk(guard.test)
        }
        if any(
            read.place in deciding and id(read.at) in tests
            for step in program.graph.steps
            for read in (step.reads if step.epoch is epoch else ())
        ):
            message = (
                "break of the epoch loop is decided by a value that a restart loses"
            )
            yield program.finding(ER209, event, message)


_STATES = re.compile(r"bit_generator|[gs]et_?state\b")  # which a program keeps by hand


def _generators(program: Walked) -> Iterator[Finding]:
    """Yield generators from before the epochs that draw where nothing is replayed."""
    renewed = [seed.value for seed in program.events("seeded") if seed.step.epoch]
    seen: list[Value] = []
    for event in program.events("drawn"):
        own = event.value
        if own is None or own in seen or own in renewed or own.made_at < 0:
            continue
        is_seeded = bool(own.parts) or own.name == "torch.Generator"  # else ER501
        made = program.made(own)
        is_kept = own.registered or own.is_handed_on
        is_kept = is_kept or bool(_STATES.search(made.step.module.text))
        if program.zone(made.step) != "P" or is_kept or not is_seeded:
            continue
        if (zone := program.zone(event.step)) in ("L", "C"):
            seen.append(own)
            message = (
                f"this generator draws in zone {zone} (line {event.step.line}), and is "
                "in no state: a restart makes it again, with its first draws"
            )
            yield program.finding(ER301, made, message)


CHECKS = (check, _generators)
