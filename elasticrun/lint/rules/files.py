"""ER104 to ER106: files that replayed code appends, empties or moves again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Fix
from elasticrun.lint.graph import DataLoop
from elasticrun.lint.mending import add_argument, replace
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts, is_checked
from elasticrun.lint.walk.core import Event

_TOLERANT = {
    "Path.unlink": "missing_ok=True",
    "Path.mkdir": "exist_ok=True",
    "os.makedirs": "exist_ok=True",
}
_FORGIVING = ("OSError", "FileNotFoundError", "FileExistsError", "Exception", "IOError",
              "BaseException", "PermissionError")  # fmt: skip


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER104 to ER106."""
    opened = program.events("file_opened")
    filled = program.events("file_written")
    for event in [*filled, *program.events("appended")]:
        mode = event.value.data if event.value is not None else "a"
        if not isinstance(mode, str) or not mode.startswith("a"):
            continue
        yield from _appended(program, event)
    for event in opened:
        mode = event.data[-1]
        if not mode.startswith("w") or is_checked(event.step):
            continue
        zone = program.zone(event.step)
        again = program.replayed(event) or program.is_before_epochs(event)
        if again and _is_written_later(program, event, opened, filled):
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
    program: Program, event: Event, opened: list[Event], filled: list[Event]
) -> bool:
    assert event.value is not None
    own = [each for each in filled if each.value is event.value]
    if event.step.epoch is not None:
        return any(program.zone(each.step) in ("L", "C") for each in own)
    if any(program.zone(each.step) in ("A", "B", "L", "C") for each in own):
        return True
    return any(
        each.data[-1].startswith("a") and _is_same_file(each, event)
        for each in opened
        if each is not event
    )


def _is_same_file(one: Event, other: Event) -> bool:
    """Return whether two files that are opened have the same path."""
    path, text, _ = one.data
    other_path, other_text, _ = other.data
    if path is other_path or (path.kind == "const" and path.data == other_path.data):
        return True
    if not text or text != other_text:
        return False
    is_fixed = text.startswith(("'", '"', "f'", 'f"')) or text.isupper()
    return is_fixed or one.step.module is other.step.module


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
    unsure = doubts(event.value)
    yield program.finding(
        "ER106", event.at, event.step, message, loop=loop, doubts=unsure, fix=fix
    )


def _appending(event: Event) -> Fix | None:
    """Return the fix that opens a file to append."""
    node, mode = event.at, event.data[-1]
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
    """Return whether what is moved is written right before, as in atomic saves."""
    node = event.at
    if not isinstance(node, ast.Call):
        return False
    source = node.args[0] if node.args else None
    if isinstance(node.func, ast.Attribute) and event.data[0].startswith("Path."):
        source = node.func.value
    if source is None:
        return False
    text = written(source)
    before = event.step.module.lines[max(0, node.lineno - 12) : node.lineno - 1]
    return any(
        text in line
        and any(word in line for word in ("save", "open(", "write", "dump"))
        for line in before
    )
