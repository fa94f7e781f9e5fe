"""ER401 to ER403: what all replicas must do together, or only one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding
from elasticrun.lint.graph import Guard, Step
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts, is_once

_CHANGING = frozenset(("rank", "random", "time", "entropy", "generation", "exists"))


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER401 to ER403."""
    yield from _collectives(program)
    yield from _loops(program)
    yield from _states(program)
    yield from _paths(program)


def _rank_guard(step: Step) -> Guard | None:
    return next((each for each in step.guards if "rank" in each.taints), None)


def _collectives(program: Program) -> Iterator[Finding]:
    guarded: dict[tuple[str, int], set[tuple[int, bool]]] = {}
    events = program.events("collective")
    for event in events:
        guard = _rank_guard(event.step)
        if guard is not None:
            key = (str(event.data), id(guard.function))
            guarded.setdefault(key, set()).add((guard.number, guard.holds))
    for event in events:
        guard = _rank_guard(event.step)
        if guard is None:
            continue
        key = (str(event.data), id(guard.function))
        if len(guarded[key]) > 1:
            continue  # another branch, or the opposite test, has it as well
        message = (
            f"{event.data} is collective, and runs only where the test at line "
            f"{_line(guard)} holds; the other replicas wait"
        )
        yield program.finding("ER401", event.at, event.step, message)


def _line(guard: Guard) -> int:
    return getattr(guard.test, "lineno", 0)


def _loops(program: Program) -> Iterator[Finding]:
    for loop in program.walker.loops:
        step = program.graph.steps[loop.head]
        guard = _rank_guard(step)
        if guard is None or not loop.is_elastic:
            continue
        message = (
            f"the loop over {loop.text} runs only where the test at line "
            f"{_line(guard)} holds; the other replicas never enter it"
        )
        unsure = doubts(loop)
        yield program.finding("ER401", loop.node, step, message, doubts=unsure)


def _states(program: Program) -> Iterator[Finding]:
    events = program.events("state_made")
    branches = {
        (event.data, guard.number, guard.holds)
        for event in events
        for guard in event.step.guards
    }
    for event in events:
        step = event.step
        # What both branches make is made in any case.
        taints = frozenset().union(
            *(
                guard.taints
                for guard in step.guards
                if (event.data, guard.number, not guard.holds) not in branches
            )
        )
        name = event.data if isinstance(event.data, str) else "state"
        if taints & _CHANGING:
            message = f"{name} is created under a condition that may differ"
            yield program.finding("ER402", event.at, step, message)
        elif _is_in_epoch(step) and name != "Accumulator":
            message = (
                f"{name} is created in the epoch loop, again in each epoch that is "
                "not skipped"
            )
            yield program.finding("ER402", event.at, step, message)


def _is_in_epoch(step: Step) -> bool:
    return step.epoch is not None and step.loop is None and not is_once(step)


def _paths(program: Program) -> Iterator[Finding]:
    for event in program.events("saved", "file_opened"):
        if _rank_guard(event.step) is not None:
            continue
        if event.kind == "file_opened" and not str(event.data[-1]).startswith(
            ("w", "a")
        ):
            continue
        node = event.at
        if isinstance(node, ast.Call) and "rank" in written(node):
            continue
        if program.zone(event.step):
            message = "every replica writes this path"
            yield program.finding("ER403", event.at, event.step, message)
