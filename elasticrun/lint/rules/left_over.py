"""ER307 and ER304: what a loop leaves behind, and numbers that begin again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import DataLoop, Read, ValuePlace, Write
from elasticrun.lint.program import Walked, doubts
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.uses import Uses, is_clock

ER307 = Rule(
    "ER307 W loop variable read after the loop",
    help="keep it in Variables or an Accumulator, or read it in the loop's body",
)


def left_over(
    program: Walked, uses: Uses, loop: DataLoop, means: set[ValuePlace]
) -> Iterator[Finding]:
    """Yield what a loop sets and the program reads after it, but for means of sums."""
    for write in uses.first_writes(loop, ("set", "target")):
        place = write.place
        if not uses.reads.get(place) or place[1] == "[]" or is_clock([write]):
            continue
        if place not in means or not _is_made_before(uses, loop, place):
            yield from _read_after(program, uses, loop, write)


def _read_after(
    program: Walked, uses: Uses, loop: DataLoop, write: Write
) -> Iterator[Finding]:
    outside = [r for r in uses.reads[write.place] if not r.step.is_in(loop)]
    if not outside or any(
        uses.is_sum(each, loop)
        for each in uses.writes[write.place]
        if each.step.loop is loop
    ):
        return
    reached = uses.reached(write.step, write.place)
    behind = (r for r in outside if r.step in reached and r.step.epoch is loop.epoch)
    reads = [read for read in behind if uses.loudness([read])]
    if not reads:
        return
    first = min(reads, key=lambda each: each.step.number)
    message = (
        f"`{write.name}` is set in the loop at {program.zones.where(loop, first.step)} "
        "and read after it; a loop that was finished before a restart sets nothing"
    )
    made_before = _is_made_before(uses, loop, write.place)
    only_shown = uses.loudness(reads) != "decides"
    yield program.finding(
        ER307,
        first,
        message,
        loop=loop,
        doubts=doubts(loop) + int(made_before and only_shown),
    )


def _is_made_before(uses: Uses, loop: DataLoop, place: ValuePlace) -> bool:
    return any(
        each.step.loop is not loop and each.how == "set" for each in uses.writes[place]
    )


ER304 = Rule(
    "ER304 W index of enumerate used as a step",
    help="use loader.enumerate() or loader.batch_index",
)


def numbered(program: Walked, uses: Uses, loop: DataLoop) -> Iterator[Finding]:
    """Yield uses of an enumerate index as the number of a step."""
    seen: set[ValuePlace] = set()
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
                yield program.finding(ER304, read, message, doubts=doubts(loop))


def _as_step(uses: Uses, place: ValuePlace, seen: set[ValuePlace]) -> Read | None:
    """Return a reading of an index that depends on its being the true one."""
    for read in uses.reads.get(place, []):
        kind = read.sink.kind
        if kind in ("track", "optimizer", "save"):
            return read
        if kind == "test" and not _guards_optimizer(read) and not _asks_first(read):
            return read
        if kind == "flow":
            for target in read.sink.places:
                if target not in seen:
                    seen.add(target)
                    if _as_step(uses, target, seen) is not None:
                        return read
    return None


def _asks_first(read: Read) -> bool:
    """Return whether a test is for the first batch, and nothing is left by it."""
    statement = read.step.node
    if not isinstance(statement, ast.If):
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
    return isinstance(statement, ast.If) and any(
        isinstance(each, ast.Attribute) and each.attr in ("step", "no_sync")
        for each in ast.walk(statement)
    )
