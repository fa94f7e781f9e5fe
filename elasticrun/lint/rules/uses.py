"""What becomes of a volatile value: does it decide, is it saved, or only printed?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from elasticrun.lint.graph import DataLoop, Read, Step, ValuePlace, Write
from elasticrun.lint.naming import named
from elasticrun.lint.program import Walked
from elasticrun.lint.values import Value

_DECIDING = frozenset(("test", "save", "optimizer"))
PARTIAL = ("update", "grow")  # writes that make the new value from the old one
_UNUSED = frozenset(("own", "none"))
# Attributes of these are no plain memory: a state keeps them, if one has the object, or
# they are none of the program's own.
_KEPT = named(
    "model param optimizer param_groups group ext module loader plain_loader "
    "tracker file opaque scheduler ema scaler"
)


class Uses:
    """Every place of a program with its reads and writes."""

    def __init__(self, program: Walked) -> None:
        self.program = program
        self.reads: dict[ValuePlace, list[Read]] = defaultdict(list)
        self.writes: dict[ValuePlace, list[Write]] = defaultdict(list)
        for step in program.graph.steps:
            made = {
                write.place[0]
                for write in step.writes
                if write.how == "set" and write.place[1] == "[]"
            }
            for read in step.reads:
                if read.place[0] not in made:  # what is made here is new
                    self.reads[read.place].append(read)
            for write in step.writes:
                self.writes[write.place].append(write)

    def is_volatile(self, place: ValuePlace) -> bool:
        """Return whether a place is plain Python memory."""
        base: Value | None = self.program.walk.bases.get(place[0])
        if base is None:
            return True
        return not base.is_durable and base.kind not in _KEPT

    def killers(self, place: ValuePlace) -> set[Step]:
        """Return the steps whose value for a place owes nothing to the old one."""
        emptied = (place[0], "[]")  # a container made anew loses all its items
        writes = [*self.writes[place], *self.writes.get(emptied, ())]
        return {
            write.step for write in writes if write.how in ("set", "target", "bind")
        }

    def passing(
        self, place: ValuePlace, inside: set[Step] | None = None
    ) -> Callable[[Step], bool]:
        """Return whether a place's value outlives a step, if given one inside."""
        killers = self.killers(place)
        return lambda step: step not in killers and (inside is None or step in inside)

    def first_writes(self, loop: DataLoop, hows: tuple[str, ...]) -> Iterator[Write]:
        """Yield for each plain place its first such write in a loop's body."""
        seen: set[ValuePlace] = set()
        for step in self.program.graph.steps:
            for write in step.writes if step.loop is loop else ():
                if write.how in hows and write.place not in seen:
                    seen.add(write.place)
                    if self.is_volatile(write.place):
                        yield write

    def is_sum(self, write: Write, loop: DataLoop) -> bool:
        """Return whether a write in a loop adds to what an earlier batch left."""
        if write.how not in PARTIAL:
            return False
        killers = self.killers(write.place)

        def passes(step: Step) -> bool:
            return step.is_in(loop) and step not in killers

        return write.step in self.program.graph.forward([loop.step], passes)

    def loudness(self, reads: list[Read]) -> str:
        """Return `decides`, `shown` or an empty text for what reads lead to."""
        return self._loudness(reads, set())

    def _loudness(self, reads: list[Read], seen: set[ValuePlace]) -> str:
        best = ""
        for read in reads:
            kind = read.sink.kind
            if kind in _DECIDING:
                return "decides"
            if kind == "flow":
                for place in read.sink.places:
                    if place in seen:
                        continue
                    seen.add(place)
                    found = self._of_place(place, seen)
                    if found == "decides":
                        return found
                    best = best or found
            elif kind not in _UNUSED:
                best = "shown"
        return best

    def _of_place(self, place: ValuePlace, seen: set[ValuePlace]) -> str:
        base = self.program.walk.bases.get(place[0])
        if base is not None and base.is_durable:
            return "decides"
        return self._loudness(self.reads.get(place, []), seen)

    def followed(self, places: set[ValuePlace]) -> set[ValuePlace]:
        """Return some places and all plain ones that get values from them."""
        found, todo = set(places), list(places)
        while todo:
            for read in self.reads.get(todo.pop(), []):
                for place in read.sink.places:
                    if place not in found and self.is_volatile(place):
                        found.add(place)
                        todo.append(place)
        return found

    def reached(self, step: Step, place: ValuePlace) -> set[Step]:
        """Return the steps at which a value written in a step may still be read."""
        killers = self.killers(place)
        return self.program.graph.forward([step], lambda each: each not in killers)


def is_creation(write: Write) -> bool:
    """Return whether a write is that of the items with which a container is made."""
    is_whole = write.value is not None and write.place == (write.value.uid, "[]")
    return is_whole and write.how == "set"


def is_clock(writes: list[Write]) -> bool:
    """Return whether a place only ever holds the time."""
    return all(
        write.value is not None and write.value.taints == frozenset(("time",))
        for write in writes
    )
