"""ER202, ER211, ER302, ER304, ER307: what is read behind loops, and plain loaders."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, Step, ValuePlace, Write
from elasticrun.lint.program import doubts, is_once
from elasticrun.lint.rules.dataflow import PARTIAL, Dataflow, steps_of

ER202 = Rule(
    "ER202 W loader iterated outside an epoch, its result in plain variables",
    help="keep the sum in an Accumulator",
)
ER211 = Rule(
    "ER211 W plain DataLoader trains in an elastic epoch",
    help="make it an AdaptiveDataLoader",
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


def behind(flow: Dataflow, lost: set[ValuePlace]) -> Iterator[Finding]:
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
    outside = loop.epoch is None
    message = (
        f"`{write.name}` is a plain sum over a loop: it has only this replica's part"
        f"{'' if loop.is_inner else ' since the last restart'}"
    )
    is_own = write.value is not None and "batch" in write.value.taints
    is_loud = is_own or loudness == "decides"
    yield flow.program.finding(
        ER202 if outside else ER302,
        flow.program.called_at(write, loop.step.call),
        message,
        loop=loop,
        severity="W" if is_loud else "H",
        doubts=doubts(loop),
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


def _read_after(flow: Dataflow, loop: DataLoop, write: Write) -> Iterator[Finding]:
    program, place = flow.program, write.place
    # A generator that hands out the last batch behind its loop runs the body there.
    bodies = {read.at for read in flow.reads.get(place, ()) if read.step.is_in(loop)}
    reads = [
        read
        for read in flow.reads_behind(loop, place, write.step)
        if read.at not in bodies
        and read.step.epoch is loop.epoch
        and flow.loudness([read])
    ]
    if not reads or place[1] == "[]":
        return
    first = min(reads, key=lambda each: each.step.number)
    message = (
        f"`{write.name}` is set in the loop at {program.zones.where(loop, first.step)} "
        "and read after it; a restart skips the loop if it was finished"
    )
    yield program.finding(ER307, first, message, loop=loop, doubts=doubts(loop))


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
            yield flow.program.finding(ER304, write, message, doubts=doubts(loop))


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
