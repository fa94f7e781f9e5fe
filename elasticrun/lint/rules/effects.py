"""ER109 to ER112: draws, messages and logs that replayed code repeats."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint import catalog, roles
from elasticrun.lint.events import Draw, Event, Logged, Made, Outside, Saved, Seeded
from elasticrun.lint.finding import Finding
from elasticrun.lint.naming import written
from elasticrun.lint.program import Walked, doubts
from elasticrun.lint.rules.rule import Rule

ER109 = Rule(
    "ER109 W random draw not keyed by seed and epoch in replayed code",
    help="draw from a generator seeded with (seed, epoch), or inside a loop",
)


def _draws(program: Walked) -> Iterator[Finding]:
    seeds = [
        (event, seeded.name)
        for event, seeded in program.events(Seeded)
        if event.step.epoch is not None and program.zone(event.step) != "L"
    ]
    for event, draw in program.events(Draw):
        loop = program.replayed(event)
        if loop is None or (draw.is_keyed and event.value is None):
            continue
        if event.value is not None and event.value.in_epoch:
            continue
        if any(_is_seed_of(seed, name, event, draw) for seed, name in seeds):
            continue
        during = program.during(loop, event.step)
        message = f"random draw ({draw.name}) {during} draws another value"
        yield program.finding(ER109, event, message, loop=loop, doubts=doubts(loop))


def _is_seed_of(seed: Event, name: str, event: Event, draw: Draw) -> bool:
    """Return whether a seed given in an epoch is that of the generator drawn from."""
    if seed.step.epoch is not event.step.epoch:
        return False
    if seed.value is not None or event.value is not None:
        return seed.value is event.value
    return roles.made_by(name) != "rng" and _family(name) in ("", _family(draw.name))


def _family(name: str) -> str:
    """Return the package whose global generator a name is about; empty for all."""
    first = name.split(".", 1)[0]
    if first in ("sklearn", "scipy"):
        return "numpy"
    if name.endswith("_") and "." not in name:  # `uniform_` of a tensor
        return "torch"
    return first if first in ("torch", "numpy", "random") else ""


ER110 = Rule(
    "ER110 W external effect sent again",
    help=(
        "send it after the last dataset loop, guard it with once(key), or give the run "
        "an id to continue; let one rank do it"
    ),
)


ER111 = Rule(
    "ER111 H logged again in replayed code",
    help="log after the last dataset loop of the epoch",
)


ER112 = Rule(
    "ER112 H live weights saved in replayed code",
    help="save after the last dataset loop of the epoch",
)


def _effects(program: Walked) -> Iterator[Finding]:
    for event, sent in program.events(Outside):
        loop = program.replayed(event)
        is_early = program.is_before_epochs(event)
        if loop is None and (not is_early or sent.name in catalog.RUNS_PROGRAM):
            continue
        zone = program.zone(event.step)
        message = f"{sent.name} in zone {zone} takes effect again after a restart"
        yield program.finding(ER110, event, message, loop=loop)
    yield from _trackers(program)
    for event, _ in program.events(Logged):
        loop = program.replayed(event)
        if loop is not None:
            message = (
                f"logged in zone {program.zone(event.step)}, again after a restart"
            )
            yield program.finding(ER111, event, message, loop=loop)
    for event, saved in program.events(Saved):
        loop = program.replayed(event)
        holds_weights = any(x in written(event.at) for x in ("state_dict", "model"))
        if loop is not None and "torch" in saved.name and holds_weights:
            during = program.during(loop, event.step)
            message = f"live weights saved {during} overwrites them with later ones"
            yield program.finding(ER112, event, message, loop=loop)


def _trackers(program: Walked) -> Iterator[Finding]:
    for event, made in program.events(Made):
        name, node = made.name, event.at
        keys = catalog.TRACKER_KEYS.get(name) if made.role == "tracker" else None
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
            yield program.finding(ER110, event, message)


CHECKS = (_draws, _effects)
