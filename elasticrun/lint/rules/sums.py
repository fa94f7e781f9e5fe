"""ER302 and ER202: sums over a loop that hold only a part."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, Place, Read, Step, Write
from elasticrun.lint.program import Program, doubts
from elasticrun.lint.rules.uses import PARTIAL, Uses


def sums(
    program: Program,
    uses: Uses,
    loop: DataLoop,
    *,
    carried: set[Place],
    means: set[Place],
) -> Iterator[Finding]:
    """Yield what a loop adds up in plain memory and the program reads behind it.

    Args:
        carried: Places that ER301 has reported.
        means: Gets the places that hold what the loop makes of such a sum.
    """
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
            loudness = uses.loudness(_reads_behind(uses, loop, write))
            if loudness:
                means.update(means_of(uses, loop, place))
                yield _partial(program, loop, write, loudness)


def _reads_behind(uses: Uses, loop: DataLoop, write: Write) -> list[Read]:
    """Return where a sum is read behind its loop, or a mean made of it in the loop."""
    starts = {write.place: write.step, **means_of(uses, loop, write.place)}
    found: list[Read] = []
    for place, step in starts.items():
        reached = uses.reached(step, place)
        found += [
            each
            for each in uses.reads.get(place, ())
            if each.step.loop is not loop and each.step.number in reached
        ]
    return found


def means_of(uses: Uses, loop: DataLoop, place: Place) -> dict[Place, Step]:
    """Return what a loop's body makes of a sum and keeps, as in `avg = sum / count`."""
    return {
        target: read.step
        for read in uses.reads.get(place, ())
        if read.step.loop is loop
        for target in read.sink.places
        if target != place and uses.is_volatile(target)
    }


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
