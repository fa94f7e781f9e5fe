"""`elasticrun status --scaling`: what each number of replicas gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from elasticrun.adaptive.noise import MeasuredStep, Noise, summarize_newest
from elasticrun.adaptive.scaling import Scaling, scaling_of
from elasticrun.adaptive.step_time import TimedSteps
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.inspection.contents import plan_in, states_of_loaders
from elasticrun.checkpoint.inspection.listing import InspectionError
from elasticrun.checkpoint.states.expected import STEP_TIMES, check_values

_NOISE = re.compile(r"(.+\.)?noise")


def show_scaling(checkpoint: Checkpoint, *, as_json: bool) -> Iterator[str]:
    """Yield the table of each loader whose loops were trained with."""
    noise = _noise_in(checkpoint)
    tables = {
        name: _table(values, noise)
        for name, values in states_of_loaders(checkpoint)
        if "step_times" in values
    }
    if not tables:
        raise InspectionError(
            f"{checkpoint.path} has no times of steps. The job keeps them once an "
            "optimizer that it knows has stepped ten times in a loop over an "
            "AdaptiveDataLoader; look again after the next checkpoint."
        )
    if as_json:
        named = {name: [row._asdict() for row in t] for name, t in tables.items()}
        yield json.dumps(named)
    else:
        for name, table in tables.items():
            yield from _lines(name, table, noise)


def _noise_in(checkpoint: Checkpoint) -> Noise:
    """Return what was measured, if exactly one model measures it."""
    names = [name for name in checkpoint.names() if _NOISE.fullmatch(name)]
    if len(names) != 1:
        return summarize_newest([])
    with checkpoint.open(names[0]) as file:
        steps = json.loads(file.read())["steps"]
    return summarize_newest([MeasuredStep(*step) for step in steps])


def _table(values: dict[str, Any], noise: Noise) -> list[Scaling]:
    times = values["step_times"]
    check_values(times, STEP_TIMES, name="times of steps")
    return scaling_of(
        [TimedSteps(*step) for step in times["steps"]],
        noise,
        base=plan_in(values)[0],
        batch_size=times["batch_size"],
        max_batch_size=times["max_batch_size"],
        max_local_batch_size=times["max_local_batch_size"],
        min_efficiency=times["min_efficiency"],
    )


def _lines(name: str, table: list[Scaling], noise: Noise) -> Iterator[str]:
    yield f"{name}: {noise}"
    yield (
        f"{'replicas':>10}{'batch size':>12}{'samples/s':>12}{'efficiency':>12}"
        f"{'goodput':>12}{'speedup':>10}"
    )
    for row in table:
        if row.speedup is None:
            yield f"{row.replicas:>10}  {row.basis}"
            continue
        efficiency = "unknown" if row.efficiency is None else f"{row.efficiency:.2f}"
        goodput = "unknown" if row.goodput is None else f"{row.goodput:.4g}"
        yield (
            f"{row.replicas:>10}{row.batch_size:>12}{row.samples_per_second:>12.4g}"
            f"{efficiency:>12}{goodput:>12}{row.speedup:>10.2f}  {row.basis}"
        )
    yield f"{f'from {table[-1].replicas + 1}':>10}  not measured"
