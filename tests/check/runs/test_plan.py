"""What a run tells its replicas to do."""

from __future__ import annotations

import pytest

from elasticrun.check.runs.plan import Limits, Plan, decode_plan
from elasticrun.check.runs.scenarios import RestartPlace


def test_a_plan_survives_its_way_to_a_replica() -> None:
    plan = Plan(
        "work", ("home",), ("scratch",), "records", "checkpoints", 1,
        until=RestartPlace(0, 1, 2),
    )  # fmt: skip
    assert decode_plan(plan.encode()) == plan


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(61, 29), (64, 32), (32, 32), (30, 30), (33, 25), (5, 5)],
)
def test_a_cut_loop_keeps_the_size_of_its_last_batch(
    num_samples: int, expected: int
) -> None:
    assert Limits(max_batches=4).samples(num_samples, 8) == expected
    assert Limits(max_batches=0).samples(num_samples, 8) == num_samples
