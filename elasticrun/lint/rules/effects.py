"""ER104, ER105, ER110, ER114, ER115: effects that starts and replays repeat."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint import naming
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.graph import Event, Site
from elasticrun.lint.naming import named, written
from elasticrun.lint.program import Program, is_checked, is_once, keywords_of

ER104 = Rule(
    "ER104 E file appended in replayed code",
    help="make it a LogFile, or guard it with once(key) on one rank",
)
ER105 = Rule(
    "ER105 W file emptied at every restart",
    help="make it a LogFile",
)
ER110 = Rule(
    "ER110 W external effect sent again",
    help="send it after the last loop or under once(key), on one rank; give runs an id",
)
ER114 = Rule(
    "ER114 W rows appended again after a kill",
    help="make it a LogFile, which goes back to its place in the checkpoint",
)
ER115 = Rule(
    "ER115 W output that each start names anew",
    help="name it by an argument, or put it into ELASTICRUN_CHECKPOINT_DIR",
)

_COUNTING = named("wandb.log trackio.log swanlab.log")  # each call is another step
_APPEND = 'append, with mode "a" (or give a LogFile to a StreamHandler)'


def _files(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER104, ER105 and ER114."""
    filled = program.events("written")
    reported: set[ast.AST] = set()  # by ER104 and ER105, where it is opened
    for event in filled:
        if event.value is None or event.value.mode.startswith("a"):
            for finding in _appended(program, event):
                reported.add(_opened_at(event))
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
            reported |= {
                e.at for e in program.events("opened") if _is_same_file(e, event)
            }
            is_log = event.name.startswith("logging.")
            yield program.finding(
                ER105, event, message, loop=loop, help_text=_APPEND if is_log else None
            )
    for event in program.events("moved"):
        if _is_emptied(program, event):
            message = "removed at each start: what earlier starts wrote is lost"
            yield program.finding(ER105, event, message)
    yield from _logs(program, filled, reported)


def _appended(program: Program, event: Event) -> Iterator[Finding]:
    loop = program.replayed(event)
    at: Event | Site = event
    if event.value is not None and event.value.made_at >= 0:
        made = program.made(event.value)  # by the `with` statement around, or before
        at = made if program.zone(made.step) == program.zone(event.step) else event
    if loop is not None:
        message = f"file appended {program.during(loop, event.step)} appends it again"
        yield program.finding(ER104, at, message, loop=loop)
    elif program.is_before_epochs(event):
        zone = program.zone(event.step)
        message = f"file appended in zone {zone}; every restart appends it again"
        yield program.finding(ER104, at, message, severity="W")


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


def _is_emptied(program: Program, event: Event) -> bool:
    """Return whether files are removed at each start: all of some, or a folder."""
    given = event.at.args[:1] if isinstance(event.at, ast.Call) else []
    if not program.is_before_epochs(event):
        return False
    if event.name in ("os.remove", "os.unlink", "Path.unlink"):
        return any(isinstance(each, ast.For) for each in event.plain_loops)
    return event.name == "shutil.rmtree" and any(
        written(path) == written(node)
        for path in given
        for each in program.events("moved")
        if each.name.endswith(("mkdir", "makedirs"))
        for node in ast.walk(each.at)
    )


def _effects(program: Program) -> Iterator[Finding]:
    for event in program.events("sent", "logged"):
        if only_reads(event) or not _is_effect(event):
            continue
        loop = program.replayed(event)
        is_early = program.is_before_epochs(event) and event.what == "sent"
        if loop is None and (not is_early or event.role == "program"):
            continue
        zone = program.zone(event.step)
        message = f"{event.name} in zone {zone} takes effect again after a restart"
        yield program.finding(ER110, program.changed_at(event), message, loop=loop)
    yield from _trackers(program)


def _is_effect(event: Event) -> bool:
    """Return whether more happens than that people see a line or a number again."""
    is_step = event.name in _COUNTING and "step" not in keywords_of(event.at)
    return event.what == "sent" or is_step


def only_reads(event: Event) -> bool:
    """Return whether a request asks for something, and changes nothing."""
    args, keywords = event.given.args, event.given.keywords
    if event.name == "urllib.request.urlopen":
        source = written(args[0].node) if args and args[0].node is not None else ""
        has_data = len(args) > 1 or "data" in keywords
        return not has_data and "Request(" not in source + written(event.at)
    method = [*args[:1], *(v for k, v in keywords.items() if k == "method")]
    return event.name.endswith(".request") and any(
        each.constant in ("GET", "HEAD") for each in method
    )


def _trackers(program: Program) -> Iterator[Finding]:
    for event in program.events("made", role="tracker"):
        keys = missing_keys(event)
        if keys and program.zone(event.step) in ("P", "A", "B"):
            message = (
                f"{event.name} without {' or '.join(keys)} begins another run after "
                "every restart"
            )
            yield program.finding(ER110, event, message)


def missing_keys(event: Event) -> tuple[str, ...]:
    """Return the arguments by which a tracker's run goes on, if none is given."""
    keys = naming.TRACKER_KEYS.get(event.name, ())
    return () if keywords_of(event.at) & {None, *keys} else keys


CHECKS = (_files, _names, _effects)
