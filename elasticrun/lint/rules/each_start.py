"""ER107: registered states that each start changes again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked, doubts

# What happens to what is trained, and what each start does.
_STEPPED = {
    "scheduler": ("LR scheduler stepped", "steps it again"),
    "optimizer": ("optimizer stepped", "steps it again"),
    "scaler": ("gradient scaler updated", "updates it again"),
    "ema": ("averaged weights updated", "updates them again"),
    "average": ("averaged weights updated", "updates them again"),
    "weights": ("weights changed", "changes them again"),
    "loaded": ("state loaded", "replaces what the checkpoint has"),
}
_CHANGED = {
    "update": ("updated from its own value", "updates it again"),
    "grow": ("grows", "adds to it again"),
}
_APPLYING = ("init", "reset", "weight", "prune", "noise", "reinit")


ER107 = Rule(
    "ER107 E registered state changed again at every start",
    help="do it before the state is registered, or once: `if once(key):`",
)


def _changes(program: Walked) -> Iterator[Finding]:
    for event in program.events("trained"):
        if event.how == "apply" and not _changes_weights(event.at):
            continue
        if _is_done_again(program, event):
            what, again = _STEPPED[event.role]
            yield _finding(program, event, what, again, doubts(event.value))
    for event in program.events("changed"):
        if event.how != "set" and _is_done_again(program, event):
            how, again = _CHANGED[event.how]
            # A counter of starts is meant to change.
            yield _finding(
                program, event, f"`{event.text}` is saved, and {how}", again, 1
            )


def _is_done_again(program: Walked, event: Event) -> bool:
    return event.registered and program.is_kept_at_start(event)


def _finding(
    program: Walked, event: Event, what: str, again: str, unsure: int
) -> Finding:
    message = f"{what} in zone P, after registration; every restart {again}"
    return program.finding(ER107, event, message, doubts=unsure)


def _changes_weights(node: ast.AST) -> bool:
    """Return whether the function that `apply` is given is named for that."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    text = written(node.args[0]).lower()
    return any(word in text for word in _APPLYING)


CHECKS = (_changes,)
