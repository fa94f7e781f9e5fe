"""What a replica knows, for a rescue, of what others have added to a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchmetrics

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, register
from elasticrun.job.current import current_job
from elasticrun.testing import run_generation


def add(directory: str) -> list[Any]:
    elasticrun.init(directory, save_interval="off")
    alike, uneven = Accumulator(name="alike"), Accumulator(name="uneven")
    register(metric=(metric := torchmetrics.SumMetric()))
    for _ in AdaptiveDataLoader(range(4), 2):
        alike["samples"] += 1
        if elasticrun.rank() == 0:
            uneven["samples"] += 1
            metric.update(1.0)
    elasticrun.save_all_states()
    names = "alike", "uneven", "metric"
    return [each.own_part() for each in current_job().states if each.name in names]


def test_a_replica_that_has_nothing_knows_when_others_may_have_something(
    tmp_path: Path,
) -> None:
    nothing, unknown = None, list[Any]()
    [first, second] = run_generation(add, 2, str(tmp_path))
    assert first == second == [nothing, unknown, unknown]
