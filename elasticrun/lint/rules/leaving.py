"""ER208 and ER210: loops that chance decides about, and stops that are swallowed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import DataLoop, Guard, Spot, WalkedLoop
from elasticrun.lint.naming import STOPS, last_name
from elasticrun.lint.program import Walked, doubts, in_words
from elasticrun.lint.values import UNFIXED

_UNCERTAIN = UNFIXED | {"rank"}


ER208 = Rule(
    "ER208 E whether a loop runs depends on rank, random numbers or time",
    help="let the epoch's number or a saved value decide, or use request_stop()",
)


def _uncertain(program: Walked) -> Iterator[Finding]:
    loops: list[WalkedLoop] = [*program.graph.loops, *program.graph.epochs]
    for loop in loops:
        if isinstance(loop, DataLoop) and not loop.is_elastic:
            continue
        uncertain = _uncertain_of(loop.step.guards)
        if isinstance(loop, DataLoop):
            uncertain -= {"rank"}  # of which ER401 speaks
        if uncertain:
            message = f"whether this loop runs depends on {in_words(uncertain)}"
            yield program.finding(ER208, loop, message, doubts=doubts(loop))
    for event in program.events("left"):
        loop_left = event.loop
        if loop_left is None:
            continue
        if isinstance(loop_left, DataLoop) and not loop_left.is_elastic:
            continue
        num_outer = len(loop_left.step.guards)
        if uncertain := _uncertain_of(event.step.guards[num_outer:]):
            message = (
                f"whether the loop at line {loop_left.line} goes on depends on "
                f"{in_words(uncertain)}"
            )
            yield program.finding(ER208, event, message)


def _uncertain_of(guards: Iterable[Guard]) -> frozenset[str]:
    return frozenset().union(*(guard.taints for guard in guards)) & _UNCERTAIN


ER210 = Rule(
    "ER210 E handler swallows the stop",
    help="catch Exception, or raise again",
)


def _handlers(program: Walked) -> Iterator[Finding]:
    for event in program.events("suppressed"):
        message = "suppress() swallows the stop, which leaves a loop as SystemExit"
        yield program.finding(ER210, event, message)
    for event in program.events("guarded"):
        node = event.at
        assert isinstance(node, ast.Try)
        for handler in node.handlers:
            raises = any(isinstance(each, ast.Raise) for each in ast.walk(handler))
            if _catches_stop(handler) and not raises:
                message = "handler swallows the stop, which leaves a loop as SystemExit"
                yield program.finding(ER210, Spot(handler, event.step), message)
        for statement in node.finalbody:
            if isinstance(statement, ast.Return | ast.Continue | ast.Break):
                message = "`finally` that leaves swallows the stop"
                yield program.finding(ER210, Spot(statement, event.step), message)


def _catches_stop(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return not STOPS.isdisjoint(map(last_name, kinds))


CHECKS = (_uncertain, _handlers)
