"""ER302 and ER202: sums over a loop that hold only a part."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, Read, Step, ValuePlace, Write
from elasticrun.lint.program import Walked, doubts
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.uses import PARTIAL, Uses


def sums(
    program: Walked,
    uses: Uses,
    loop: DataLoop,
    *,
    carried: set[ValuePlace],
    means: set[ValuePlace],
) -> Iterator[Finding]:
    """Yield what a loop adds up in plain memory and the program reads behind it.

    Args:
        carried: Places that ER301 has reported.
        means: Gets the places that hold what the loop makes of such a sum.
    """
    for write in uses.first_writes(loop, PARTIAL):
        if write.place in carried or not uses.is_sum(write, loop):
            continue
        loudness = uses.loudness(_reads_behind(uses, loop, write))
        if loudness:
            means.update(means_of(uses, loop, write.place))
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
            if not each.step.is_in(loop) and each.step in reached
        ]
    return found


def means_of(uses: Uses, loop: DataLoop, place: ValuePlace) -> dict[ValuePlace, Step]:
    """Return what a loop's body makes of a sum and keeps, as in `avg = sum / count`."""
    return {
        target: read.step
        for read in uses.reads.get(place, ())
        if read.step.loop is loop
        for target in read.sink.places
        if target != place and uses.is_volatile(target)
    }


ER202 = Rule(
    "ER202 H loader iterated outside an epoch, its result in plain variables",
    help="keep the sum in an Accumulator",
)


ER302 = Rule(
    "ER302 W sum over a loop covers only a part",
    help=(
        "keep the sum in an Accumulator, which adds the replicas up in its "
        "synchronized() block"
    ),
)


def _partial(program: Walked, loop: DataLoop, write: Write, loudness: str) -> Finding:
    outside = loop.epoch is None
    message = (
        f"`{write.name}` is summed over a loop in plain memory: it covers only this "
        f"process's part{'' if loop.is_inner else ' since the last restart'}"
    )
    severity = "W" if loudness == "decides" and not outside else "H"
    return program.finding(
        ER202 if outside else ER302,
        write,
        message,
        loop=loop,
        severity=severity,
        doubts=doubts(loop),
    )
