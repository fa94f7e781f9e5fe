"""ER101 to ER103, ER107, ER108: replayed code that changes a saved value again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elasticrun.lint.events import Changed, Event, Grown, SettingChanged, Trained
from elasticrun.lint.finding import Edit, Finding, Fix, place_of
from elasticrun.lint.graph import DataLoop, Step
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked, doubts
from elasticrun.lint.project import LINE_END, Module
from elasticrun.lint.rules.rule import EPOCHS, TRAIN, VALID, Rule

_SCALING = frozenset(("Mult", "Div", "Pow", "FloorDiv", "Mod"))
_APPLYING = ("init", "reset", "weight", "prune", "noise", "reinit")


def _again(program: Walked, event: Event) -> tuple[str, DataLoop | None] | None:
    """Return in words why an event happens again, and by which loop; None if not."""
    loop = program.replayed(event)
    if loop is not None:
        return program.during(loop, event.step), loop
    if event.registered and program.is_before_epochs(event):
        return "in zone P after it was registered; every restart", None
    return None


ER101 = Rule(
    "ER101 E LR scheduler stepped in replayed code",
    help="move it after the last dataset loop of the epoch",
    why=(
        "The scheduler is saved with the number of its steps. Code in front of a loop "
        "runs again when the job stops in that loop, so the schedule is one step ahead "
        "after each such restart. `step(epoch)` sets instead of adding, and is fine."
    ),
    wrong=f"{EPOCHS}\n{TRAIN}\n    scheduler.step()\n{VALID}\n",
    right=f"{EPOCHS}\n{TRAIN}\n{VALID}\n    scheduler.step()\n",
)


ER107 = Rule(
    "ER107 E weights, averaged weights or optimizer stepped in replayed code",
    help="move it into a loop's body or after the last dataset loop of the epoch",
    why=(
        "Weights are saved as they were when the job stopped. A step in replayed code "
        "is made once more for each restart."
    ),
    wrong=f"""\
ema = torch.optim.swa_utils.AveragedModel(net)
register(ema=ema)
{EPOCHS}
{TRAIN}
    ema.update_parameters(net)
{VALID}
""",
    right=f"""\
ema = torch.optim.swa_utils.AveragedModel(net)
register(ema=ema)
{EPOCHS}
{TRAIN}
{VALID}
    ema.update_parameters(net)
""",
)


def _steps(program: Walked) -> Iterator[Finding]:
    verbs = {
        "scheduler": (ER101, "LR scheduler stepped", "steps it again"),
        "optimizer": (ER107, "optimizer stepped", "steps it again"),
        "scaler": (ER107, "gradient scaler updated", "updates it again"),
        "ema": (ER107, "averaged weights updated", "updates them again"),
        "weights": (ER107, "weights changed", "changes them again"),
    }
    for event, trained in program.events(Trained):
        rule, what, consequence = verbs.get(trained.role, (ER107, "", ""))
        # One of an epoch's number sets the schedule instead of adding to it.
        if not what or "epoch" in trained.taints:
            continue
        if trained.how == "apply" and not _changes_weights(event.at):
            continue
        again = _again(program, event)
        if again is None:
            continue
        why, loop = again
        message = f"{what} {why} {consequence}"
        unsure = doubts(event.value, loop)
        yield program.finding(
            rule,
            event,
            message,
            loop=loop,
            doubts=unsure,
            fix=_moved_to_end(event.at, event.step),
        )


def _changes_weights(node: ast.AST) -> bool:
    """Return whether the function that `apply` is given is named for that."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    text = written(node.args[0]).lower()
    return any(word in text for word in _APPLYING)


ER102 = Rule(
    "ER102 E counter updated from its own value in replayed code",
    help="move it into a loop's body or after the last dataset loop of the epoch",
    why=(
        "What is in Variables or a State comes back with the value that it had when "
        "the job stopped. Adding to it in replayed code adds once more for each "
        "restart."
    ),
    wrong=f"seen = Variables(epochs=0)\n{EPOCHS}\n    seen.epochs += 1\n{TRAIN}\n",
    right=f"seen = Variables(epochs=0)\n{EPOCHS}\n{TRAIN}\n    seen.epochs += 1\n",
)


ER103 = Rule(
    "ER103 E saved container grows in replayed code",
    help="append after the last dataset loop of the epoch",
    why=(
        "A list in Variables comes back with all that was appended before the job "
        "stopped. Appending in replayed code appends the same once more."
    ),
    wrong=f"""\
log = Variables(losses=[])
{EPOCHS}
{TRAIN}
    log.losses.append(epoch)
{VALID}
""",
    right=f"""\
log = Variables(losses=[])
{EPOCHS}
{TRAIN}
{VALID}
    log.losses.append(epoch)
""",
)


ER108 = Rule(
    "ER108 E saved value multiplied or added in replayed code",
    help="compute it from the epoch's number, or move it after the last dataset loop",
    why=(
        "The learning rate is saved with the optimizer. Multiplying it in replayed "
        "code multiplies once more for each restart."
    ),
    wrong=f"""\
{EPOCHS}
    if epoch in (10, 20):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
{TRAIN}
""",
    right=f"""\
{EPOCHS}
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.1 ** (epoch // 10)
{TRAIN}
""",
)


def _durable(program: Walked) -> Iterator[Finding]:
    for event, changed in program.events(Changed):
        if changed.operator != "Set":
            rule, verb = ER102, "updated from its own value"
            if changed.operator in _SCALING:
                rule, verb = ER108, "multiplied"
            what = f"`{changed.text}` is saved, and {verb}"
            yield from _changed(program, event, rule, what)
    for event, setting in program.events(SettingChanged):
        if setting.operator != "Set":
            what = "optimizer setting computed from its own value"
            yield from _changed(program, event, ER108, what)
    for event, _ in program.events(Grown):
        if event.registered:
            yield from _changed(program, event, ER103, "saved container grows")


def _changed(program: Walked, event: Event, rule: Rule, what: str) -> Iterator[Finding]:
    again = _again(program, event)
    if again is not None:
        why, loop = again
        yield program.finding(
            rule,
            event,
            f"{what} {why} does it again",
            loop=loop,
            doubts=doubts(event.value, loop) or int(loop is None),
            fix=_moved_to_end(event.at, event.step),
        )


def _moved_to_end(at: ast.AST, step: Step) -> Fix | None:
    """Return the fix that moves a statement to the end of the epoch's body.

    Only a simple statement that stands in the epoch's own body, alone on its lines, is
    moved: one in a branch or function would change its meaning on the way.
    """
    epoch, module = step.epoch, step.module
    if epoch is None or epoch.step.module is not module:
        return None
    body = epoch.at.body if isinstance(epoch.at, ast.For) else []
    line = getattr(at, "lineno", 0)
    found = [each for each in body if each.lineno <= line <= (each.end_lineno or 0)]
    if len(found) != 1 or found[0] is body[-1]:
        return None
    statement = found[0]
    if not isinstance(statement, ast.Expr | ast.AugAssign | ast.Assign):
        return None
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    if not _is_alone(statement, module):
        return None
    end = body[-1].end_lineno or 0
    lines = _lines(module)
    text = "".join(lines[first - 1 : last])
    if not text.endswith(("\n", "\r")):
        return None
    if not lines[end - 1].endswith(("\n", "\r")):
        text = text[len(text.rstrip("\r\n")) :] + text.rstrip("\r\n")
        insertion = Edit((end, len(lines[end - 1])), (end, len(lines[end - 1])), text)
    else:
        insertion = Edit((end + 1, 0), (end + 1, 0), text)
    removal = Edit((first, 0), (last + 1, 0), "")
    title = "Move it to the end of the epoch's body"
    return Fix((removal, insertion), False, title)


def _lines(module: Module) -> list[str]:
    """Return the lines with their ends, cut where the parser cuts them."""
    ends = [*re.findall(LINE_END, module.text), ""]
    return [line + end for line, end in zip(module.lines, ends, strict=True)]


def _is_alone(statement: ast.stmt, module: Module) -> bool:
    first = module.line(statement.lineno)
    last = module.line(statement.end_lineno or statement.lineno)
    _, start, _, end = place_of(statement, module)
    rest = last[end - 1 :].strip()
    return not first[: start - 1].strip() and (not rest or rest.startswith("#"))


CHECKS = (_steps, _durable)
