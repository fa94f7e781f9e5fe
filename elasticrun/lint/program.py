"""A program that was walked through, as the rules see it: its zones and events."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable
from functools import cached_property

from elasticrun.lint.finding import Finding, Rule, place_of
from elasticrun.lint.graph import (
    Call,
    DataLoop,
    EpochLoop,
    Event,
    Graph,
    Read,
    Site,
    Step,
    WalkedLoop,
    What,
    Write,
)
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value
from elasticrun.lint.walk.walk import Walk


class Zones:
    """The zones of one flow graph.

    P is before the epochs; A before the first dataset loop of an epoch, B between its
    loops, L in one of them, and C after the last one; D is after the epochs.

    A step of an epoch is replayed exactly when some loop over an elastic loader may
    still run after it in the same epoch: if the job stops in that loop, the step runs
    again on the way to it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[Step, str] = {}
        self.between: set[Step] = set()  # in zone D, and before more epochs
        self._heads: dict[Step, DataLoop] = {
            loop.step: loop
            for loop in graph.loops
            if loop.is_elastic and not loop.is_inner
        }
        for epoch in graph.epochs:
            self._mark_epoch(epoch)
        self._mark_outside()

    @cached_property
    def after_loops(self) -> set[Step]:
        """What may run after the beginning of an elastic loop."""
        return self.graph.forward(self._heads)

    def loops_of(self, epoch: EpochLoop | None) -> list[DataLoop]:
        """Return the elastic loops that stand in one epoch loop."""
        return [loop for loop in self._heads.values() if loop.epoch is epoch]

    def next_loop(self, step: Step) -> DataLoop | None:
        """Return the nearest loop that may still run after a step in its epoch."""
        seen: set[Step] = set()
        todo = deque(step.following)
        while todo:
            following = todo.popleft()
            if following in seen or following.epoch is not step.epoch:
                continue
            seen.add(following)
            self.graph.spend(1)
            if following in self._heads:
                return self._heads[following]
            todo += following.following
        return None

    def _mark_epoch(self, epoch: EpochLoop) -> None:
        heads = [loop.step for loop in self.loops_of(epoch)]
        self.graph.spend(len(self.graph.steps))

        def inside(step: Step) -> bool:
            return step.epoch is epoch

        before = self.graph.backward(heads, inside) | set(heads)
        after = self.graph.forward(heads, inside)
        for step in self.graph.steps:
            if step.epoch is not epoch:
                continue
            if step.loop is not None and step.loop.epoch is epoch:
                self.names[step] = "L"
            elif step in before:
                self.names[step] = "B" if step in after else "A"
            else:
                self.names[step] = "C"

    def _mark_outside(self) -> None:
        epoch_heads = [epoch.step for epoch in self.graph.epochs]
        goals = epoch_heads + [
            loop.step for loop in self._heads.values() if loop.epoch is None
        ]
        leads = self.graph.backward(goals)
        comes = self.graph.forward(epoch_heads)
        for step in self.graph.steps:
            if step.epoch is not None or step in self.names:
                continue
            if step.loop is not None:
                self.names[step] = "L"
            elif step in comes:
                self.names[step] = "D"
                if step in leads:
                    self.between.add(step)
            elif step in leads:
                self.names[step] = "P"

    # Words for messages.

    def chain(self, loop: DataLoop) -> str:
        """Return the calls that lead from the epoch loop to a loop."""
        parts = []
        if loop.epoch is not None:
            parts.append(f"epoch loop {self._at(loop.epoch, loop)}")
        parts += calls_within(loop.step)
        parts.append(f"loop over {loop.text} {self._at(loop, loop.epoch or loop)}")
        return " -> ".join(parts)

    def _at(self, loop: WalkedLoop, other: WalkedLoop) -> str:
        return self.where(loop, other.step).removeprefix("line ")

    def where(self, loop: WalkedLoop, step: Step) -> str:
        """Return where a loop stands, as seen from a step."""
        module = loop.step.module
        is_near = module is step.module
        return f"line {loop.line}" if is_near else f"{module.name}:{loop.line}"


def calls_within(step: Step) -> list[str]:
    """Return the calls that lead to a step, from its epoch loop on, if any."""
    links = step.call.links() if step.call else []
    outer = step.epoch.step.call if step.epoch else None
    known = outer.links() if outer else []
    return [f"{link.name} {link.line}" for link in links[len(known) :]]


_IN_WORDS = {
    "rank": "the rank",
    "random": "a random draw",
    "time": "the time",
    "entropy": "what differs in each process",
    "generation": "the number of restarts",
}


class Program:
    """A walk, its zones, and how to report what is found in it."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.graph = walk.graph
        self.zones = Zones(walk.graph)

    def events(self, *what: What, role: str = "") -> list[Event]:
        """Return the events of some kinds, and of a role if one is given."""
        every = (each for each in self.walk.events if each.what in what)
        return [each for each in every if not role or each.role == role]

    def made(self, value: Value) -> Site:
        """Return where an object was made."""
        assert value.node is not None
        return Site(value.node, self.graph.steps[value.made_at])

    def zone(self, step: Step) -> str:
        return self.zones.names.get(step, "")

    def finding(
        self,
        rule: Rule,
        where: Event | Read | Write | WalkedLoop | Site,
        message: str,
        *,
        loop: DataLoop | None = None,
        severity: str | None = None,
        help_text: str | None = None,
    ) -> Finding:
        """Return a finding at a node, with the chain that leads to a loop."""
        step, module = where.step, where.step.module
        place = place_of(where.at, module)
        known = self.zones.chain(loop) if loop is not None else ""
        chain = (known, " -> ".join(calls_within(step)))
        return Finding(
            rule.code, severity or rule.severity, module.name, *place,
            message, self.zone(step), module.line(place[0]),
            "; here by ".join(filter(None, chain)), help_text or rule.help,
        )  # fmt: skip

    def called_at(self, where: Write | Event | Site, known: Call | None) -> Site:
        """Return where something happens as seen from a function that is called."""
        call = where.step.call
        while call is not None and call.outer is not known:
            call = call.outer
        if call is None or call is known:
            return Site(where.at, where.step)
        steps = (each for each in self.graph.steps if each.call is known)
        step = next((each for each in steps if each.line == call.line), where.step)
        return Site(call.at, step)

    def changed_at(self, event: Event) -> Event | Site:
        """Return what to change: the call, if others of the function are harmless."""
        call = event.step.call
        others = [e for e in self.events(event.what) if e.at is event.at]
        if call is None or all(
            self.replayed(e) or self.is_before_epochs(e) for e in others
        ):
            return event
        return self.called_at(event, call.outer)

    def replayed(self, event: Event) -> DataLoop | None:
        """Return the loop that makes an event of an epoch happen again, or None."""
        if self.zone(event.step) not in ("A", "B") or is_once(event.step):
            return None
        return self.zones.next_loop(event.step)

    def during(self, loop: DataLoop, step: Step) -> str:
        """Return in words in which restart a replayed step runs again."""
        where = self.zones.where(loop, step)
        return f"in zone {self.zone(step)}; a restart during the loop at {where}"

    def is_before_epochs(self, event: Event) -> bool:
        """Return whether an event happens again after every restart, before epochs."""
        # Without any, ER002 says that all is repeated.
        has_epochs = bool(self.graph.epochs) or any(
            loop.is_elastic and not (loop.plain_loops or loop.outer)
            for loop in self.graph.loops
        )
        is_early = self.zone(event.step) == "P" or event.step in self.zones.between
        return has_epochs and is_early and not is_once(event.step)

    def is_kept_at_start(self, event: Event) -> bool:
        """Return whether each start does it again, before any loop can have begun."""
        return (
            self.zone(event.step) == "P"
            and event.step not in self.zones.after_loops
            and not is_once(event.step)
        )


def in_words(taints: Iterable[str]) -> str:
    """Return what something depends on that is not the same in all processes."""
    return " and ".join(_IN_WORDS[each] for each in sorted(taints))


def is_once(step: Step) -> bool:
    """Return whether a condition keeps a step from happening again."""
    return any({"once", "generation"} & guard.taints for guard in step.guards)


def is_lazy(step: Step) -> bool:
    """Return whether a step runs only where it asked whether something is missing."""
    tests = (written(guard.test) for guard in step.guards if guard.holds)
    return any(re.search(r" is None$| not in |^not hasattr", test) for test in tests)


def is_checked(step: Step) -> bool:
    """Return whether a step runs only where it asked whether something exists."""
    return any("exists" in guard.taints for guard in step.guards)


def keywords_of(node: ast.AST) -> set[str | None]:
    """Return the names of the arguments that a call is given by name."""
    return {each.arg for each in node.keywords} if isinstance(node, ast.Call) else set()
