"""ER101 to ER103, ER107, ER108: replayed code that changes a saved value again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Fix
from elasticrun.lint.graph import DataLoop
from elasticrun.lint.mending import move_to_end
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts
from elasticrun.lint.walk.core import Event

_SCALING = frozenset(("Mult", "Div", "Pow", "FloorDiv", "Mod"))
_APPLYING = ("init", "reset", "weight", "prune", "noise", "reinit")


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER101 to ER103, ER107 and ER108."""
    yield from _steps(program)
    yield from _durable(program)


def _again(program: Program, event: Event) -> tuple[str, DataLoop | None] | None:
    """Return in words why an event happens again, and by which loop; None if not."""
    loop = program.replayed(event)
    zone = program.zone(event.step)
    if loop is not None:
        where = program.zones.where(loop, event.step)
        return f"in zone {zone}; a restart during the loop at {where}", loop
    if event.registered and program.is_before_epochs(event):
        return "in zone P after it was registered; every restart", None
    return None


def _steps(program: Program) -> Iterator[Finding]:
    verbs = {
        "scheduler_step": ("ER101", "LR scheduler stepped", "steps it again"),
        "optimizer_step": ("ER107", "optimizer stepped", "steps it again"),
        "scaler_update": ("ER107", "gradient scaler updated", "updates it again"),
        "ema_update": ("ER107", "averaged weights updated", "updates them again"),
        "weights": ("ER107", "weights changed", "changes them again"),
    }
    for event in program.events(*verbs):
        code, what, consequence = verbs[event.kind]
        if event.kind == "scheduler_step" and "epoch" in event.data[0]:
            continue
        if event.kind == "weights" and not _changes_weights(event):
            continue
        again = _again(program, event)
        if again is None:
            continue
        why, loop = again
        message = f"{what} {why} {consequence}"
        unsure = doubts(event.value, loop)
        yield program.finding(
            code,
            event.at,
            event.step,
            message,
            loop=loop,
            doubts=unsure,
            fix=_moved_to_end(event),
        )


def _moved_to_end(event: Event) -> Fix | None:
    return move_to_end(event.at, event.step.epoch, event.step.module)


def _changes_weights(event: Event) -> bool:
    if event.data != "apply":
        return True
    node = event.at
    text = (
        written(node.args[0]).lower()
        if isinstance(node, ast.Call) and node.args
        else ""
    )
    return any(word in text for word in _APPLYING)


def _durable(program: Program) -> Iterator[Finding]:
    for event in program.events("durable_update"):
        operator, _, text = event.data
        again = _again(program, event)
        if operator == "Set" or again is None:
            continue
        code = "ER108" if operator in _SCALING else "ER102"
        verb = "multiplied" if code == "ER108" else "updated from its own value"
        yield _changed(program, event, code, f"`{text}` is saved, and {verb}", again)
    for event in program.events("setting_changed"):
        again = _again(program, event)
        if event.data != "Set" and again is not None:
            what = "optimizer setting computed from its own value"
            yield _changed(program, event, "ER108", what, again)
    for event in program.events("container_grows"):
        again = _again(program, event)
        if event.registered and again is not None:
            yield _changed(program, event, "ER103", "saved container grows", again)


def _changed(
    program: Program,
    event: Event,
    code: str,
    what: str,
    again: tuple[str, DataLoop | None],
) -> Finding:
    why, loop = again
    unsure = doubts(event.value, loop) or int(loop is None)
    return program.finding(
        code,
        event.at,
        event.step,
        f"{what} {why} does it again",
        loop=loop,
        doubts=unsure,
        fix=_moved_to_end(event),
    )
