"""ER302, ER202, ER307, ER304, ER211: what loops leave behind, and where they begin."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, Read, Step, ValuePlace, Write
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked, doubts, is_once
from elasticrun.lint.rules.dataflow import PARTIAL, Dataflow, is_clock
from elasticrun.lint.values import Value


def behind(flow: Dataflow, lost: set[ValuePlace]) -> Iterator[Finding]:
    """Yield what is read behind loops, but for the places that ER301 has reported."""
    for loop in flow.program.graph.loops:
        if not loop.is_elastic:
            yield from _plain(flow, loop)
            continue
        means: set[ValuePlace] = set()
        for write in flow.first_writes(loop, PARTIAL):
            if write.place not in lost and flow.is_sum(write, loop):
                yield from _summed(flow, loop, write, means)
        if not loop.is_inner:  # that is never continued in its middle, nor skipped
            for write in flow.first_writes(loop, ("set", "target")):
                if write.place not in means or not _is_made_before(flow, loop, write):
                    yield from _read_after(flow, loop, write)
            yield from _numbered(flow, loop)


# Sums.


ER202 = Rule(
    "ER202 W loader iterated outside an epoch, its result in plain variables",
    help="keep the sum in an Accumulator",
)
ER302 = Rule(
    "ER302 W sum over a loop covers only a part",
    help=(
        "keep the sum in an Accumulator, which adds the replicas up in its "
        "synchronized() block"
    ),
)


def _summed(
    flow: Dataflow, loop: DataLoop, write: Write, means: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield a sum in plain memory that is read behind its loop, or a mean made of it.

    Args:
        means: Gets the places that hold what the loop makes of such a sum.
    """
    own = _means_of(flow, loop, write.place)
    reads = [
        read
        for place, step in {write.place: write.step, **own}.items()
        for seeing in [flow.reached(step, place)]
        for read in flow.reads.get(place, ())
        if not read.step.is_in(loop) and read.step in seeing
    ]
    loudness = flow.loudness(reads)
    if not loudness:
        return
    means.update(own)
    outside = loop.epoch is None
    message = (
        f"`{write.name}` is summed over a loop in plain memory: it covers only this "
        f"process's part{'' if loop.is_inner else ' since the last restart'}"
    )
    if outside and any(e.epoch for e in flow.program.graph.loops if e.at is loop.at):
        return  # Of the same loop in an epoch ER302 speaks.
    is_own = write.value is not None and "batch" in write.value.taints
    is_kept = not outside or write.how == "grow"
    is_loud = is_own or (loudness == "decides" and is_kept)
    rule, unsure = ER202 if outside else ER302, doubts(loop)
    yield flow.program.finding(
        rule,
        flow.program.called_at(write, loop.step.call),
        message,
        loop=loop,
        severity="W" if is_loud else "H",
        doubts=unsure,
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


# Other values.


ER307 = Rule(
    "ER307 W loop variable read after the loop",
    help="keep it in Variables or an Accumulator, or read it in the loop's body",
)


def _read_after(flow: Dataflow, loop: DataLoop, write: Write) -> Iterator[Finding]:
    program, place = flow.program, write.place
    # A generator that hands out the last batch behind its loop runs the body there.
    every = flow.reads.get(place, ())
    bodies = {read.at for read in every if read.step.is_in(loop)}
    outside = [r for r in every if not r.step.is_in(loop) and r.at not in bodies]
    if not outside or place[1] == "[]":
        return
    if is_clock([write]) and _is_made_before(flow, loop, write):
        return
    own = [each for each in flow.writes[place] if each.step.loop is loop]
    if any(flow.is_sum(each, loop) for each in own):
        return
    seeing = flow.reached(write.step, place)
    later = (r for r in outside if r.step in seeing and r.step.epoch is loop.epoch)
    reads = [read for read in later if flow.loudness([read])]
    if not reads:
        return
    first = min(reads, key=lambda each: each.step.number)
    message = (
        f"`{write.name}` is set in the loop at {program.zones.where(loop, first.step)} "
        "and read after it; a loop that was finished before a restart sets nothing"
    )
    only_shown = flow.loudness(reads) != "decides"
    has_other = only_shown and _is_made_before(flow, loop, write, besides=None)
    unsure = doubts(loop) + int(has_other)
    yield program.finding(ER307, first, message, loop=loop, doubts=unsure)


def _is_made_before(
    flow: Dataflow, loop: DataLoop, write: Write, besides: object = ...
) -> bool:
    """Return whether a name has a value without the loop; a constant may not count."""
    return any(
        each.step.loop is not loop
        and each.how == "set"
        and not _is_constant(each.value, besides)
        for each in flow.writes[write.place]
    )


def _is_constant(value: Value | None, constant: object) -> bool:
    return value is not None and value.kind == "const" and value.constant is constant


# Numbers of batches.


ER304 = Rule(
    "ER304 W index of enumerate used as a step",
    help="use loader.enumerate() or loader.batch_index",
)


def _numbered(flow: Dataflow, loop: DataLoop) -> Iterator[Finding]:
    """Yield uses of an enumerate index as the number of a step."""
    for write in flow.first_writes(loop, ("target",)):
        value = write.value
        if value is None or value.kind != "unknown" or "enumerated" not in value.taints:
            continue
        read = _as_step(flow, write.place, set())
        if read is not None:
            message = (
                f"`{write.name}` counts from 0 again when the interrupted loop "
                f"continues, and is used as a step at line {read.step.line}"
            )
            yield flow.program.finding(ER304, write, message, doubts=doubts(loop))


def _as_step(flow: Dataflow, place: ValuePlace, seen: set[ValuePlace]) -> Read | None:
    """Return a reading of an index that depends on its being the true one."""
    for read in flow.reads.get(place, []):
        kind = read.sink.kind
        if kind in ("track", "optimizer", "save"):
            return read
        if kind == "test" and not _guards_optimizer(read) and not _asks_first(read):
            return read
        new = [each for each in read.sink.places if each not in seen]
        seen.update(new)
        if any(_as_step(flow, each, seen) is not None for each in new):
            return read
    return None


def _asks_first(read: Read) -> bool:
    """Return whether a test is for the first batch; nothing is left or saved by it."""
    statement = read.step.node
    if not isinstance(statement, ast.If) or "save" in written(statement):
        return False
    if any(
        isinstance(each, ast.Break | ast.Continue | ast.Return)
        for each in ast.walk(statement)
    ):
        return False
    return any(
        isinstance(each, ast.Compare)
        and each.left is read.at
        and isinstance(each.ops[0], ast.Eq)
        and isinstance(each.comparators[0], ast.Constant)
        and each.comparators[0].value == 0
        for each in ast.walk(statement.test)
    )


def _guards_optimizer(read: Read) -> bool:
    """Return whether a test is about gradient accumulation, which is ER305."""
    statement = read.step.node
    names = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
    is_test = isinstance(statement, ast.If) and "backward" not in names
    return is_test and not names.isdisjoint(("step", "no_sync"))


# Plain loaders.


ER211 = Rule(
    "ER211 W plain DataLoader in an elastic epoch",
    help="make it an AdaptiveDataLoader",
)


def _plain(flow: Dataflow, loop: DataLoop) -> Iterator[Finding]:
    """Yield a plain loader's loop; it is a hint if all that comes of it is shown."""
    program, graph, epoch = flow.program, flow.program.graph, loop.epoch
    if epoch is None or loop.outer is not None or is_once(loop.step):
        return

    def is_within(step: Step) -> bool:
        return step is not epoch.step

    inside = graph.forward([loop.step], is_within)
    inside &= graph.backward([loop.step], is_within)
    reads = [
        read
        for step in inside
        for write in step.writes
        if write.how in PARTIAL and flow.is_volatile(write.place)
        for read in flow.reads.get(write.place, ())
        if read.step not in inside
    ]
    # What all replicas add to an Accumulator is added so many times.
    noted = program.events("trained", "backward", "added")
    trains = any(event.step in inside for event in noted)
    if not any(each.sure for each in program.zones.loops_of(epoch)):
        if trains:
            yield _trained(program, loop)
        return
    only_shown = not trains and flow.loudness(reads) == "shown"
    if not trains and program.zone(loop.step) == "C":
        # With the weights that it had before; a file gets the same from all replicas.
        places = flow.followed({each.place for each in reads})
        reads += [read for place in places for read in flow.reads.get(place, ())]
        only_shown = not any(r.sink.kind in ("test", "optimizer") for r in reads)
    message = (
        f"loop over the plain DataLoader {loop.text} in an epoch with elastic "
        "loaders; a restart runs it from its start, on every replica"
    )
    yield program.finding(ER211, loop, message, doubts=int(only_shown))


def _trained(program: Walked, loop: DataLoop) -> Finding:
    """Return a finding at the loader; at its loop if only that is in the script."""
    made = program.made(loop.loader)
    own = (each for each in (made, loop) if each.step.module is program.walk.root)
    message = (
        f"the loop over the plain DataLoader {loop.text} trains in an elastic epoch: "
        "every replica gets all its samples, and a restart begins with the first"
    )
    return program.finding(ER211, next(own, made), message)
