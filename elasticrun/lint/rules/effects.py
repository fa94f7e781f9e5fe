"""ER110: messages that replayed code sends again."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint import catalog
from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.naming import named, written
from elasticrun.lint.program import Program, keywords_of

ER110 = Rule(
    "ER110 W external effect sent again",
    help="send it after the last loop or under once(key), on one rank; give runs an id",
)


_COUNTING = named("wandb.log trackio.log swanlab.log")  # each call is another step


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
    keys = catalog.TRACKER_KEYS.get(event.name, ())
    return () if keywords_of(event.at) & {None, *keys} else keys


CHECKS = (_effects,)
