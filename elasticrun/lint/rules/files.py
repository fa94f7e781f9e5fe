"""ER104 to ER106, ER114, ER115: what starts and replays do to files again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import Site
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts, is_checked, is_once, keywords_of

ER104 = Rule(
    "ER104 E file appended in replayed code",
    help="make it a LogFile, or guard it with once(key) on one rank",
)
ER105 = Rule(
    "ER105 W file emptied at every restart",
    help="make it a LogFile",
)
ER106 = Rule(
    "ER106 W rename, removal or creation that cannot be repeated",
    help="ask first whether it is still to do, or do it after the last loop",
)
ER114 = Rule(
    "ER114 W rows appended again after a kill",
    help="make it a LogFile, which goes back to its place in the checkpoint",
)
ER115 = Rule(
    "ER115 W output that each start names anew",
    help="name it by an argument, or put it into ELASTICRUN_CHECKPOINT_DIR",
)

_APPEND = 'append, with mode "a" (or give a LogFile to a StreamHandler)'
_TEMPORARY = re.compile(r"te?mp|\.name$", re.IGNORECASE)  # names of files; of open ones
_WRITING = re.compile(r"save|open\(|write|dump|retrieve")
_FORGIVING = re.compile(r"(?:OS|IO|Permission|File\w+)Error|Exception|^$")


def _files(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER104 to ER106, and ER114."""
    filled = program.events("written")
    said: set[ast.AST] = set()  # what ER104 and ER105 speak of, where it is opened
    for event in filled:
        if event.value is None or event.value.mode.startswith("a"):
            for finding in _appended(program, event):
                said.add(_opened_at(event))
                yield finding
    for event in program.events("opened"):
        mode = event.how
        if not mode.startswith("w") or is_checked(event.step):
            continue
        loop = program.replayed(event)
        again = loop is not None or program.is_before_epochs(event)
        if again and _is_written_later(program, event, filled):
            message = (
                f"file opened with mode {mode!r} in zone {program.zone(event.step)}: "
                "every restart loses what was written to it before"
            )
            said |= {e.at for e in program.events("opened") if _is_same_file(e, event)}
            is_log = event.name.startswith("logging.")
            yield program.finding(
                ER105, event, message, loop=loop, help_text=_APPEND if is_log else None
            )
    for event in program.events("moved"):
        yield from _moved(program, event)
    yield from _logs(program, filled, said)


def _appended(program: Program, event: Event) -> Iterator[Finding]:
    loop = program.replayed(event)
    at: Event | Site = event
    if event.value is not None and event.value.made_at >= 0:
        made = program.made(event.value)  # by the `with` statement around, or before
        at = made if program.zone(made.step) == program.zone(event.step) else event
    if loop is not None:
        message = f"file appended {program.during(loop, event.step)} appends it again"
        yield program.finding(ER104, at, message, loop=loop, doubts=doubts(loop))
    elif program.is_before_epochs(event):
        zone = program.zone(event.step)
        message = f"file appended in zone {zone}; every restart appends it again"
        yield program.finding(ER104, at, message, doubts=1)


def _is_written_later(program: Program, event: Event, filled: list[Event]) -> bool:
    """Return whether an opened file is written where a restart does not do it again."""
    if event.name.startswith("logging."):
        return True  # By whatever logs.
    own = {program.zone(each.step) for each in filled if each.value is event.value}
    return not own.isdisjoint("ABLC") or any(
        each.how.startswith("a") and _is_same_file(each, event)
        for each in program.events("opened")
    )


def _is_same_file(one: Event, other: Event) -> bool:
    """Return whether two files that are opened have the same path."""
    path, known = one.given.args[0], other.given.args[0]
    if path is known or (path.kind == "const" and path.constant == known.constant):
        return True
    is_near = one.step.module is other.step.module
    is_fixed = one.text.isupper() or one.text.startswith(("'", '"', "f'", 'f"'))
    return bool(one.text) and one.text == other.text and (is_near or is_fixed)


def _opened_at(event: Event) -> ast.AST:
    """Return where the file is opened that is written."""
    made = event.value.node if event.value is not None else None
    return made or event.at


def _logs(
    program: Program, filled: list[Event], seen: set[ast.AST]
) -> Iterator[Finding]:
    """Yield files that loops and epochs append to, each where it is opened."""
    for event in filled:
        value, zone = event.value, program.zone(event.step)
        if value is not None and not (value.kind == "file" and value.mode[:1] == "a"):
            continue
        if zone not in ("L", "C") or is_once(event.step) or is_checked(event.step):
            continue
        if _opened_at(event) not in seen:
            seen.add(_opened_at(event))
            at = event if value is None else program.made(value)
            message = (
                f"if the job is killed, rows appended in zone {zone} since the last "
                "checkpoint come twice"
            )
            yield program.finding(ER114, at, message)


def _names(program: Program) -> Iterator[Finding]:
    """Yield where a name is made that no later start makes again."""
    asked = [e for e in program.events("unfixed") if not is_once(e.step)]
    trackers = program.events("made", role="tracker")
    for event in [*trackers, *program.events("opened", "saved", "moved")]:
        is_read = event.what == "opened" and event.how[:1] not in ("w", "a", "x")
        if is_read or not program.is_before_epochs(event):
            continue
        found: Site | None = None
        if {"time", "entropy"} & event.given.taints:
            found = _named_by(program, event, asked)
        if found is not None:
            message = "each start, and each replica, gives its output another name"
            yield program.finding(ER115, found, message)


def _named_by(program: Program, event: Event, asked: list[Event]) -> Site | None:
    """Return where a name is made that depends on what is asked anew."""
    names = _names_in(event.at)
    for step in reversed(program.graph.steps[: event.step.number]):
        node = step.node
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and names & {written(e) for e in targets}:
            if any(step is each.step for each in asked):
                return Site(node, step)
            names |= _names_in(node.value)
    return None


def _names_in(node: ast.AST) -> set[str]:
    each = (e for e in ast.walk(node) if isinstance(e, ast.Name | ast.Attribute))
    return {written(e) for e in each}


def _moved(program: Program, event: Event) -> Iterator[Finding]:
    is_turned = any(isinstance(each, ast.For) for each in event.turns)
    is_rotated = is_turned and event.name.endswith(("replace", "rename", "move"))
    if _is_emptied(program, event):
        message = "folder emptied at each start: what earlier starts wrote is lost"
        yield program.finding(ER105, event, message)
        return
    if is_checked(event.step) and not is_rotated:
        return
    if _is_tolerant(event) or _is_made_just_before(event):
        return
    loop = program.replayed(event)
    if loop is None and not program.is_before_epochs(event):
        return
    zone = program.zone(event.step)
    message = f"{event.name} in zone {zone} cannot be repeated; a restart runs it again"
    yield program.finding(ER106, event, message, loop=loop, doubts=doubts(event.value))


def _is_tolerant(event: Event) -> bool:
    """Return whether it does no harm that something is there already, or is gone."""
    named = keywords_of(event.at) & {"missing_ok", "exist_ok", "ignore_errors"}
    is_temporary = any("temporary" in each.taints for each in event.given.args)
    is_caught = any(map(_FORGIVING.search, event.catching))
    return bool(named) or is_temporary or is_caught


def _is_emptied(program: Program, event: Event) -> bool:
    """Return whether a folder is removed at each start, to be made anew."""
    given = event.at.args[:1] if isinstance(event.at, ast.Call) else []
    if event.name != "shutil.rmtree" or not program.is_before_epochs(event):
        return False
    return any(
        written(path) == written(node)
        for path in given
        for each in program.events("moved")
        if each.name.endswith(("mkdir", "makedirs"))
        for node in ast.walk(each.at)
    )


def _is_made_just_before(event: Event) -> bool:
    """Return whether what is moved is written right before, as in atomic saves."""
    node = event.at
    if not isinstance(node, ast.Call):
        return False
    sources = node.args[:1]
    if isinstance(node.func, ast.Attribute) and event.name.startswith("Path."):
        sources = [node.func.value]
    texts = [
        str(each.value) if isinstance(each, ast.Constant) else written(each)
        for each in sources
    ]
    if event.name.endswith(".replace") and any(map(_TEMPORARY.search, texts)):
        return True
    before = event.step.module.lines[max(0, event.step.line - 12) : event.step.line - 1]
    return any(
        text in line and _WRITING.search(line) for text in texts for line in before
    )


CHECKS = (_files, _names)
