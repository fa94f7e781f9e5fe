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
from elasticrun.lint.rules.rule import EPOCHS, TRAIN, Rule

_BEGINNING = """\
import shutil

import torch

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until

net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""

ER113 = Rule(
    "ER113 W file or port changed beside a running generation",
    help=(
        "put it below elasticrun.init(), or behind `if elasticrun.rank() == 0:`, which "
        "needs the job"
    ),
    why=(
        "At `elasticrun scale`, and with --spares, the next replicas run what stands "
        "above the job while the others still train. These may use the file, or have "
        "the port."
    ),
    wrong=f"""\
shutil.rmtree("cache", ignore_errors=True)
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(train_set, batch_size=64)
{EPOCHS}
{TRAIN}
""",
    right=f"""\
if elasticrun.rank() == 0:
    shutil.rmtree("cache", ignore_errors=True)
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(train_set, batch_size=64)
{EPOCHS}
{TRAIN}
""",
    prelude=_BEGINNING,
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
