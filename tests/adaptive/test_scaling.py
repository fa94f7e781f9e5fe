"""What each number of replicas gives, of times that are known."""

from __future__ import annotations

import pytest

from elasticrun.adaptive.noise import MeasuredStep, Noise, summarize
from elasticrun.adaptive.scaling import Scaling, scaling_of
from elasticrun.adaptive.step_time import StepTime, TimedSteps

TRUE = StepTime((0.01, 0.001, 0.02, 0.002, 0.05, 0.005, 2.0))
UNKNOWN = summarize([])
KNOWN = summarize([MeasuredStep(100.0, 1.0 + sign) for sign in (-0.1, 0.1)] * 8)


def timed(
    *replicas: int, size: int = 64, num_nodes: int = 1, num_micro: int = 1
) -> list[TimedSteps]:
    return [
        TimedSteps(
            num_nodes,
            n,
            size / n / num_micro,
            num_micro,
            float(TRUE(num_nodes, n, size / n / num_micro, num_micro)),
        )
        for n in replicas
    ]


def test_numbers_up_to_twice_the_most_are_known() -> None:
    rows = scaling_of(timed(1, 2, 4), UNKNOWN, base=64, batch_size=64)
    assert [row.replicas for row in rows] == list(range(1, 9))
    measured = [row.replicas for row in rows if row.basis == "measured"]
    assert measured == [1, 2, 4]
    assert {row.basis for row in rows} == {"measured", "predicted"}
    for row in rows:
        assert row.samples_per_second == pytest.approx(
            64 / TRUE(1, row.replicas, 64 / row.replicas, 1), rel=0.1
        )
        assert row.efficiency is row.goodput is None
    rates = [row.samples_per_second or 0 for row in rows]
    assert [row.speedup for row in rows] == [rate / rates[0] for rate in rates]


def test_what_is_measured_is_not_what_the_model_says() -> None:
    steps = [*timed(1, 2, 4), *timed(1, 2, 4, size=32)]
    steps[1] = steps[1]._replace(seconds=5.0)
    rows = scaling_of(steps, UNKNOWN, base=64, batch_size=64)
    assert rows[1].samples_per_second == 64 / 5.0


def test_below_half_of_the_fewest_nothing_is_known() -> None:
    rows = scaling_of(timed(4, 8), UNKNOWN, base=64, batch_size=64)
    assert rows[0] == Scaling(1)
    assert rows[0].basis == "not measured"
    assert rows[1].speedup == 2.0  # Each of the fewest counts as one.


def test_other_nodes_come_when_one_is_full() -> None:
    steps = [*timed(2, 4), *timed(8, num_nodes=2)]
    rows = scaling_of(steps, UNKNOWN, base=64, batch_size=64)
    assert rows[8].samples_per_second == pytest.approx(
        64 / TRUE(3, 9, 64 / 9, 1), rel=0.1
    )


def test_efficiency_is_that_of_the_size_there_is() -> None:
    rows = scaling_of(timed(1, 2), KNOWN, base=16, batch_size=64)
    gain = (100 / 16 + 1) / (100 / 64 + 1)
    for row in rows:
        assert row.batch_size == 64
        assert row.efficiency == pytest.approx(gain * 16 / 64)
        assert row.goodput == row.samples_per_second * row.efficiency


def test_where_the_job_decides_each_number_has_its_own_size() -> None:
    rows = scaling_of(timed(1, 2), KNOWN, base=16, batch_size=64, max_batch_size=512)
    sizes = [row.batch_size or 0 for row in rows]
    assert sizes == sorted(sizes)
    assert 64 < sizes[-1] <= 128  # Twice the size now at most.
    unknown = scaling_of(timed(1), UNKNOWN, base=16, batch_size=64, max_batch_size=512)
    assert {row.batch_size for row in unknown} == {64}


def test_micro_batches_are_as_few_as_fit() -> None:
    steps = [
        step
        for size in (8, 16)
        for n in (1, 2)
        for step in timed(n, num_micro=64 // n // size)
    ]
    rows = scaling_of(steps, UNKNOWN, base=64, batch_size=64, max_local_batch_size=16)
    assert rows[3].samples_per_second == pytest.approx(64 / TRUE(1, 4, 16, 1), rel=0.2)


def test_noise_that_is_barely_known_is_unknown() -> None:
    noise: Noise = summarize([MeasuredStep(100.0, 1.0)] * 3)
    rows = scaling_of(timed(1), noise, base=16, batch_size=64)
    assert rows[0].efficiency is None
