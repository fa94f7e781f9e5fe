"""ER302 and ER202: sums over a loop that hold only a part."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, Place, Write
from elasticrun.lint.program import Program, doubts
from elasticrun.lint.rules.uses import PARTIAL, Uses


def sums(
    program: Program, uses: Uses, loop: DataLoop, carried: set[Place]
) -> Iterator[Finding]:
    """Yield what a loop adds up in plain memory and the program reads behind it."""
    seen: set[Place] = set()
    for step in program.graph.steps:
        if step.loop is not loop:
            continue
        for write in step.writes:
            place = write.place
            if write.how not in PARTIAL or place in seen or place in carried:
                continue
            seen.add(place)
            if not uses.is_volatile(place) or not uses.is_sum(write, loop):
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


def emptied(program: Program) -> Iterator[Finding]:
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
