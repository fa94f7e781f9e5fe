"""ER101 to ER112: replayed code that changes the durable world again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint import catalog
from elasticrun.lint.finding import Finding, Fix
from elasticrun.lint.graph import DataLoop
from elasticrun.lint.mending import add_argument, move_to_end, replace
from elasticrun.lint.program import Program, doubts, is_checked
from elasticrun.lint.walk.core import Event

_SCALING = frozenset(("Mult", "Div", "Pow", "FloorDiv", "Mod"))
_APPLYING = ("init", "reset", "weight", "prune", "noise", "reinit")
_TOLERANT = {
    "Path.unlink": "missing_ok=True",
    "Path.mkdir": "exist_ok=True",
    "os.makedirs": "exist_ok=True",
}
_FORGIVING = ("OSError", "FileNotFoundError", "FileExistsError", "Exception", "IOError",
              "BaseException", "PermissionError")  # fmt: skip


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER101 to ER112."""
    yield from _steps(program)
    yield from _durable(program)
    yield from _files(program)
    yield from _draws(program)
    yield from _effects(program)


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
        ast.unparse(node.args[0]).lower()
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


def _files(program: Program) -> Iterator[Finding]:
    opened = program.events("file_opened")
    written = program.events("file_written")
    for event in [*written, *program.events("appended")]:
        mode = event.value.data if event.value is not None else "a"
        if not isinstance(mode, str) or not mode.startswith("a"):
            continue
        yield from _appended(program, event)
    for event in opened:
        path, mode = event.data
        if not mode.startswith("w") or is_checked(event.step):
            continue
        zone = program.zone(event.step)
        again = program.replayed(event) or program.is_before_epochs(event)
        if again and _is_written_later(program, event, path, opened, written):
            loop = again if isinstance(again, DataLoop) else None
            message = (
                f"file opened with mode {mode!r} in zone {zone}, which every restart "
                "runs again; what was written to it before is lost"
            )
            fix = _appending(event)
            yield program.finding(
                "ER105", event.at, event.step, message, loop=loop, fix=fix
            )
    for event in program.events("file_moved"):
        yield from _moved(program, event)


def _appended(program: Program, event: Event) -> Iterator[Finding]:
    loop = program.replayed(event)
    zone = program.zone(event.step)
    if is_checked(event.step):
        return
    if loop is not None:
        where = program.zones.where(loop, event.step)
        message = (
            f"file appended in zone {zone}; a restart during the loop at {where} "
            "appends it again"
        )
        yield program.finding(
            "ER104", event.at, event.step, message, loop=loop, doubts=doubts(loop)
        )
    elif program.is_before_epochs(event):
        message = "file appended in zone P; every restart appends it again"
        yield program.finding("ER104", event.at, event.step, message, doubts=1)


def _is_written_later(
    program: Program,
    event: Event,
    path: str,
    opened: list[Event],
    written: list[Event],
) -> bool:
    assert event.value is not None
    is_constant = path.startswith(("'", '"', "f'")) or path.isupper()
    own = [each for each in written if each.value is event.value]
    if event.step.epoch is not None:
        return any(program.zone(each.step) in ("L", "C") for each in own)
    if any(program.zone(each.step) in ("A", "B", "L", "C") for each in own):
        return True
    return bool(path) and any(
        each.data[0] == path
        and each.data[1].startswith("a")
        and (is_constant or each.step.module is event.step.module)
        for each in opened
        if each is not event
    )


def _moved(program: Program, event: Event) -> Iterator[Finding]:
    name, keywords, catching = event.data
    if {"missing_ok", "exist_ok", "ignore_errors"} & keywords or is_checked(event.step):
        return
    if any(word in each or not each for each in catching for word in _FORGIVING):
        return
    loop = program.replayed(event)
    if loop is None and not program.is_before_epochs(event):
        return
    if _is_made_just_before(event):
        return
    zone = program.zone(event.step)
    message = f"{name} in zone {zone} cannot be repeated; a restart runs it again"
    argument = _TOLERANT.get(name)
    fix = add_argument(event.at, argument, event.step.module) if argument else None
    yield program.finding("ER106", event.at, event.step, message, loop=loop, fix=fix)


def _appending(event: Event) -> Fix | None:
    """Return the fix that opens a file to append."""
    node, mode = event.at, event.data[1]
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and each.value == mode:
            new = repr(mode.replace("w", "a"))
            source = event.step.module.line(each.lineno)[each.col_offset :]
            new = new.replace("'", '"') if source.startswith('"') else new
            module = event.step.module
            title = "Append to the file"
            return replace(each, new, module, title=title, is_safe=False)
    return None


def _is_made_just_before(event: Event) -> bool:
    """Return whether what is moved is written anew right before, as for atomic saves."""
    node = event.at
    if not isinstance(node, ast.Call):
        return False
    source = node.args[0] if node.args else None
    if isinstance(node.func, ast.Attribute) and event.data[0].startswith("Path."):
        source = node.func.value
    if source is None:
        return False
    text = ast.unparse(source)
    before = event.step.module.lines[max(0, node.lineno - 12) : node.lineno - 1]
    return any(
        text in line
        and any(word in line for word in ("save", "open(", "write", "dump"))
        for line in before
    )


def _draws(program: Program) -> Iterator[Finding]:
    seeded = [
        event
        for event in program.events("seeded")
        if event.step.epoch is not None and program.zone(event.step) != "L"
    ]
    for event in program.events("draw"):
        name, is_keyed, _ = event.data
        loop = program.replayed(event)
        if loop is None or is_keyed:
            continue
        if event.value is not None and event.value.in_epoch:
            continue
        if any(each.step.epoch is event.step.epoch for each in seeded):
            continue
        zone = program.zone(event.step)
        where = program.zones.where(loop, event.step)
        message = (
            f"random draw ({name}) in zone {zone}; a restart during the loop at {where} "
            "draws another value"
        )
        yield program.finding(
            "ER109", event.at, event.step, message, loop=loop, doubts=doubts(loop)
        )


def _effects(program: Program) -> Iterator[Finding]:
    for event in program.events("outside"):
        loop = program.replayed(event)
        is_early = program.is_before_epochs(event)
        if loop is None and (not is_early or event.data in catalog.RUNS_PROGRAM):
            continue
        zone = program.zone(event.step)
        message = f"{event.data} in zone {zone} takes effect again after a restart"
        yield program.finding("ER110", event.at, event.step, message, loop=loop)
    yield from _trackers(program)
    for event in program.events("logged", "saved"):
        loop = program.replayed(event)
        if loop is None:
            continue
        zone = program.zone(event.step)
        if event.kind == "logged":
            message = f"logged in zone {zone}, again after a restart"
            yield program.finding("ER111", event.at, event.step, message, loop=loop)
        elif "torch" in event.data[0] and _saves_weights(event.at):
            message = (
                f"live weights saved in zone {zone}; a restart during the loop at "
                f"{program.zones.where(loop, event.step)} overwrites them with later ones"
            )
            yield program.finding("ER112", event.at, event.step, message, loop=loop)


def _trackers(program: Program) -> Iterator[Finding]:
    for event in program.events("tracker_made"):
        assert event.value is not None
        name = str(event.data)
        keys = catalog.TRACKER_KEYS.get(name)
        node = event.at
        if keys is None or not isinstance(node, ast.Call):
            continue
        given = {each.arg for each in node.keywords}
        if None in given or given & set(keys):
            continue
        if program.zone(event.step) in ("P", "A", "B"):
            message = (
                f"{name} without {' or '.join(keys)} begins another run after every "
                "restart"
            )
            yield program.finding("ER110", event.at, event.step, message)


def _saves_weights(node: ast.AST) -> bool:
    return "state_dict" in ast.unparse(node) or "model" in ast.unparse(node)
