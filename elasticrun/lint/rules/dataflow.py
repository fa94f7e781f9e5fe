"""Which steps read what a write has left in a plain place, and what they do with it."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from elasticrun.lint.graph import (
    OWN,
    DataLoop,
    EpochLoop,
    Guard,
    Read,
    Step,
    ValuePlace,
    WalkedLoop,
    Write,
)
from elasticrun.lint.naming import named, written
from elasticrun.lint.program import Program, is_lazy
from elasticrun.lint.values import Value

_NO_NEWS = ("bind", "drop")
PARTIAL = ("update", "grow")  # writes that make the new value from the old one
_DECIDING = frozenset(("test", "save", "optimizer"))
_UNSEEN = frozenset(("own", "none", "flow"))
_EMPTY = "empty"  # in place of a constant: a container that is made without items
# Attributes of these are no plain memory: a state keeps them, if one has the object, or
# they are none of the program's own.
_KEPT = named(
    "model param optimizer param_groups group ext module loader plain_loader "
    "tracker file opaque scheduler ema scaler"
)
# What a later start makes again.
_ANEW = ("iterator", "file", "opaque")


class LoopBody(NamedTuple):
    """A loop that a restart may interrupt between its iterations, with its steps."""

    head: Step
    steps: set[Step]
    loop: EpochLoop | DataLoop


class CarriedValue(NamedTuple):
    """A plain place that a loop writes, and the writes that reach later iterations."""

    place: ValuePlace
    survivors: list[Write]


class Dataflow:
    """Every place of a program with its reads and writes, and what reaches what."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reads: dict[ValuePlace, list[Read]] = defaultdict(list)
        self.writes: dict[ValuePlace, list[Write]] = defaultdict(list)
        steps = program.graph.steps
        self.calm = {e for e in steps if not isinstance(e.node, ast.ExceptHandler)}
        for step in steps:
            emptied = [
                each.place for each in step.writes if each.how in ("set", "drop")
            ]
            made = {place[0] for place in emptied if place[1] == "[]"}
            for read in step.reads:
                if read.place[0] not in made:  # what is made here is new
                    self.reads[read.place].append(read)
            for write in step.writes:
                self.writes[write.place].append(write)

    def is_volatile(self, place: ValuePlace) -> bool:
        """Return whether a place is plain Python memory."""
        base: Value | None = self.program.walk.bases.get(place[0])
        is_kept = base is not None and (base.is_durable or base.kind in _KEPT)
        return not is_kept and place not in self.program.walk.saved

    def reached(
        self, start: Step, place: ValuePlace, inside: Container[Step] | None = None
    ) -> set[Step]:
        """Return the steps that may see what a place holds behind a step.

        It is followed up to the steps whose value owes nothing to the old one, and, if
        some steps are given, as far as these go.
        """
        emptied = (place[0], "[]")  # a container made anew loses all its items
        killers = {
            write.step
            for write in [*self.writes[place], *self.writes.get(emptied, ())]
            if write.how in ("set", "target", "bind", "drop")
        }
        begun = self.program.walk.begun.get(place[0])  # each call has its own locals
        return self.program.graph.forward(
            [start],
            lambda step: (
                step not in killers
                and step is not begun
                and (inside is None or step in inside)
            ),
        )

    def carried(self, body: LoopBody) -> Iterator[CarriedValue]:
        """Yield what iterations leave to later ones, if it is a new value."""
        for place, writes in self._written(body.steps).items():
            survivors = [
                each
                for each in writes
                if body.head in self.reached(each.step, place, body.steps)
            ]
            every = self.writes[place]
            first = [each for each in every if each.step not in body.steps]
            if survivors and not _are_first_value(first, survivors):
                yield CarriedValue(place, survivors)

    def _written(self, inside: set[Step]) -> dict[ValuePlace, list[Write]]:
        """Return the plain places that some steps write and any others read."""
        places: dict[ValuePlace, list[Write]] = {}
        self.program.graph.spend(len(self.program.graph.steps))
        for step in self.program.graph.steps:
            for write in step.writes if step in inside else ():
                value = write.value
                is_made_anew = value is not None and (
                    value.kind in _ANEW or (value.is_durable and is_lazy(write.step))
                )
                # So a container gets the items with which it is made.
                is_whole = value is not None and write.place == (value.uid, "[]")
                is_creation = is_whole and write.how == "set"
                if write.how in _NO_NEWS or is_creation or is_made_anew:
                    continue
                if self.reads.get(write.place) and self.is_volatile(write.place):
                    places.setdefault(write.place, []).append(write)
        return {place: each for place, each in places.items() if not is_clock(each)}

    def seen_from(
        self, body: LoopBody, place: ValuePlace, exposed: set[Step]
    ) -> list[Read]:
        """Return where exposed steps read what an earlier iteration has left.

        Where the same test stands around a write and a reading after it, the reading
        sees that write. So it does where all writes stand under tests like
        `epoch >= 5`: once one has been made, each later iteration makes it again.
        """
        fresh: list[tuple[int, set[tuple[str, bool]]]] = []
        for write in self.writes[place]:
            step = write.step
            guards = [each for each in step.guards if not _holds_first(each)]
            tests = _steady_tests(guards)
            if write.how == "set" and step in body.steps and len(tests) == len(guards):
                fresh.append((step.number, tests))
        repeated_until = self._repeated_until(body, place)

        def is_old(read: Read) -> bool:
            if read.step.number > repeated_until:
                return False
            known = _steady_tests(read.guards) if fresh else set()
            number = read.step.number
            return not any(n < number and tests <= known for n, tests in fresh)

        reads = (each for each in self.reads[place] if each.step in exposed)
        return [e for e in reads if e.step not in body.steps or is_old(e)]

    def _repeated_until(self, body: LoopBody, place: ValuePlace) -> float:
        """Return the step until which each epoch makes all writes of a place again."""
        changed = {
            write.name
            for step in body.steps
            for write in step.writes
            if write.how not in (*_NO_NEWS, "target")
        }
        last = 0
        for write in self.writes[place]:
            if write.step not in body.steps or write.how in _NO_NEWS:
                continue
            guards = write.step.guards[len(body.head.guards) :]
            is_plain = write.how == "set" and write.step.loop is None
            if not is_plain or not all(_rises(e, body, changed) for e in guards):
                return math.inf
            last = max(last, write.step.number)
        return last

    def first_writes(self, loop: DataLoop, hows: tuple[str, ...]) -> Iterator[Write]:
        """Yield for each plain place its first such write in a loop's body."""
        seen: set[ValuePlace] = set()
        self.program.graph.spend(len(self.program.graph.steps))
        for step in self.program.graph.steps:
            for write in step.writes if step.loop is loop else ():
                if write.how in hows and write.place not in seen:
                    seen.add(write.place)
                    if self.is_volatile(write.place):
                        yield write

    def reads_behind(
        self, loop: WalkedLoop, place: ValuePlace, start: Step
    ) -> Iterator[Read]:
        """Yield where a place is read behind a loop with what a step in it has left.

        An error that is handled leads there from a loop that has begun; and where a
        test asks whether the value is missing, it is made.
        """
        reads = [r for r in self.reads.get(place, ()) if not r.step.is_in(loop)]
        asking = {
            r.step for r in reads if r.sink == OWN and type(r.step.node) is ast.If
        }
        calm = self.calm - asking if asking else self.calm
        seeing = self.reached(start, place, calm) if reads else set()
        return (read for read in reads if read.step in seeing)

    def leads_to(self, reads: Iterable[Read]) -> list[Read]:
        """Return some reads, and those of all plain places that get their values."""
        every, seen = [*reads], set[ValuePlace]()
        for read in every:  # which grow meanwhile
            for place in read.sink.places:
                if place not in seen and self.is_volatile(place):
                    seen.add(place)
                    every += self.reads.get(place, ())
        return every

    def loudness(self, reads: Iterable[Read]) -> str:
        """Return whether values that are read decide, are shown, or none of these.

        Returns:
            `decides`, `shown` or an empty text.
        """
        every = self.leads_to(reads)
        kinds = {read.sink.kind for read in every}
        places = {place for read in every for place in read.sink.places}
        bases = [self.program.walk.bases.get(place[0]) for place in places]
        is_kept = any(each is not None and each.is_durable for each in bases)
        if is_kept or kinds & _DECIDING:
            return "decides"
        return "shown" if kinds - _UNSEEN else ""


def steps_of(program: Program, loop: DataLoop) -> set[Step]:
    """Return the steps in a loop's body, or in those of loops inside."""
    program.graph.spend(len(program.graph.steps))
    return {step for step in program.graph.steps if step.is_in(loop)}


def _holds_first(guard: Guard) -> bool:
    """Return whether a test like `i % n == 0` holds in a loop's first iteration."""
    is_remainder = {"enumerated", "modulo"} <= guard.taints and guard.holds
    return is_remainder and written(guard.test).endswith(" == 0")


def _steady_tests(guards: Iterable[Guard]) -> set[tuple[str, bool]]:
    """Return the tests that come out alike in a whole iteration."""
    steady = (each for each in guards if each.taints <= {"rank", "epoch"})
    return {(written(each.test), each.holds) for each in steady}


def _rises(guard: Guard, body: LoopBody, changed: set[str]) -> bool:
    """Return whether a test such as `epoch >= 5` holds in all later epochs, too."""
    if not (isinstance(body.loop, EpochLoop) and isinstance(guard.test, ast.Compare)):
        return False
    left, ops, right = guard.test.left, guard.test.ops, guard.test.comparators
    rising = (ast.Gt, ast.GtE) if guard.holds else (ast.Lt, ast.LtE)
    is_bound = isinstance(right[0], ast.Constant | ast.Name | ast.Attribute)
    own = {write.name for write in body.head.following[0].writes}
    return (
        len(ops) == 1
        and isinstance(ops[0], rising)
        and written(left) in own - changed
        and is_bound
        and written(right[0]) not in changed
    )


def _are_first_value(first: list[Write], survivors: list[Write]) -> bool:
    """Return whether each iteration leaves the constant from before the loop."""
    values = {_constant_of(each) for each in [*first, *survivors]}
    return bool(first) and len(values) == 1 and None not in values


def _constant_of(write: Write) -> str | None:
    value = write.value
    if write.how not in ("set", "update"):
        return None
    if value is None:
        return _EMPTY if write.place[1] == "[]" else None
    if value.kind == "const":
        return f"{type(value.constant)} {value.constant!r}"
    same = str(value.uid) if value.is_object else None  # what holds it is another place
    return _EMPTY if value.is_empty else same


def is_clock(writes: list[Write]) -> bool:
    """Return whether a place only ever holds the time."""
    return all(
        write.value is not None and write.value.taints == frozenset(("time",))
        for write in writes
    )
