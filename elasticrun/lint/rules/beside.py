"""ER113: what stands above the job and disturbs a generation that runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding
from elasticrun.lint.program import Walked, is_checked, keywords_of
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
    above = list(itertools.takewhile(lambda each: each.what != "job", events))
    if len(above) == len(events):
        return
    for event in above:
        if _disturbs(event) and not is_checked(event.step):
            what = event.name or "open"
            message = (
                f"{what} above the job, where the next replicas run it while the "
                "others train"
            )
            yield program.finding(ER113, event, message)


def _disturbs(event: Event) -> bool:
    if event.what == "moved":
        return "exist_ok" not in keywords_of(event.at)
    if event.what == "opened":
        return event.how[:1] in ("w", "a", "x")
    return event.what in ("port", "saved")


CHECKS = (check,)
