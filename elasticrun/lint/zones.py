"""Zones: where each step stands to the loops, and which loop makes it replayed."""

from __future__ import annotations

from collections import deque
from functools import cached_property

from elasticrun.lint.graph import DataLoop, EpochLoop, Graph, Step, WalkedLoop


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

    def zone(self, step: Step) -> str:
        return self.names.get(step, "")

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
