"""ER109 to ER112: draws, messages and logs that replayed code repeats."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint import catalog, roles
from elasticrun.lint.finding import Finding
from elasticrun.lint.naming import written
from elasticrun.lint.program import Program, doubts
from elasticrun.lint.walk.core import Event


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER109 to ER112."""
    yield from _draws(program)
    yield from _effects(program)


def _draws(program: Program) -> Iterator[Finding]:
    seeded = [
        event
        for event in program.events("seeded")
        if event.step.epoch is not None and program.zone(event.step) != "L"
    ]
    for event in program.events("draw"):
        name, is_keyed, _ = event.data
        loop = program.replayed(event)
        if loop is None or (is_keyed and event.value is None):
            continue
        if event.value is not None and event.value.in_epoch:
            continue
        if any(_is_seed_of(each, event) for each in seeded):
            continue
        zone = program.zone(event.step)
        where = program.zones.where(loop, event.step)
        message = (
            f"random draw ({name}) in zone {zone}; a restart during the loop at "
            f"{where} "
            "draws another value"
        )
        yield program.finding(
            "ER109", event.at, event.step, message, loop=loop, doubts=doubts(loop)
        )


def _is_seed_of(seeding: Event, draw: Event) -> bool:
    """Return whether a seed given in an epoch is that of the generator drawn from."""
    if seeding.step.epoch is not draw.step.epoch:
        return False
    if seeding.value is not None or draw.value is not None:
        return seeding.value is draw.value
    name = str(seeding.data[0])
    return roles.made_by(name) != "rng" and _family(name) in ("", _family(draw.data[0]))


def _family(name: str) -> str:
    """Return the package whose global generator a name is about; empty for all."""
    first = name.split(".", 1)[0]
    if first in ("sklearn", "scipy"):
        return "numpy"
    if name.endswith("_") and "." not in name:  # `uniform_` of a tensor
        return "torch"
    return first if first in ("torch", "numpy", "random") else ""


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
                f"{program.zones.where(loop, event.step)} overwrites them with later "
                f"ones"
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
    return "state_dict" in written(node) or "model" in written(node)
