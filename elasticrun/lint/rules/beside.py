"""ER113: what stands above the job and disturbs a generation that runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from elasticrun.lint.events import (
    Event,
    FileMoved,
    FileOpened,
    JobNeeded,
    PortTaken,
    Saved,
)
from elasticrun.lint.finding import Finding
from elasticrun.lint.program import Walked, is_checked
from elasticrun.lint.rules.rule import Rule

ER113 = Rule(
    "ER113 W file or port changed beside a running generation",
    help=(
        "put it below elasticrun.init(), or behind `if elasticrun.rank() == 0:`, which "
        "needs the job"
    ),
)


def check(program: Walked) -> Iterator[Finding]:
    """Yield what happens before the first call that needs the job, if there is one."""
    events = program.walk.events
    above = list(
        itertools.takewhile(lambda each: not isinstance(each.what, JobNeeded), events)
    )
    if len(above) == len(events):
        return
    for event in above:
        if _disturbs(event) and not is_checked(event.step):
            name = getattr(event.what, "name", "open")
            message = (
                f"{name} above the job, where the next replicas run it while the "
                "others train"
            )
            yield program.finding(ER113, event, message)


def _disturbs(event: Event) -> bool:
    what = event.what
    if isinstance(what, FileMoved):
        return "exist_ok" not in what.keywords
    if isinstance(what, FileOpened):
        return what.mode[:1] in ("w", "a", "x")
    return isinstance(what, (PortTaken, Saved))


CHECKS = (check,)
