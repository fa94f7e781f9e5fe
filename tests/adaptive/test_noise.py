"""What follows from the noise that steps have measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from elasticrun.adaptive.noise import MeasuredStep, Noise, measure_step, summarize


def test_a_step_tells_the_variance_between_its_chunks() -> None:
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(10, 3)) + 1
    cut = np.split(gradients, [1, 4, 8])
    mean = gradients.mean(axis=0)
    step = measure_step(
        chunk_squares=sum(len(c) / 10 * np.sum(c.mean(axis=0) ** 2) for c in cut),
        total_square=float(np.sum(mean**2)),
        batch_size=10,
        num_chunks=4,
    )
    between = sum(len(c) * np.sum((c.mean(axis=0) - mean) ** 2) for c in cut) / 3
    assert step is not None
    np.testing.assert_allclose(step, [between, np.sum(mean**2) - between / 10])


@pytest.mark.parametrize(("square", "num_chunks"), [(1.0, 1), (math.nan, 2)])
def test_a_step_may_tell_nothing(square: float, num_chunks: int) -> None:
    step = measure_step(
        chunk_squares=1.0, total_square=square, batch_size=2, num_chunks=num_chunks
    )
    assert step is None


def drawn(covariance: float, squared_norm: float, error: float) -> list[MeasuredStep]:
    values = np.random.default_rng(1).normal(size=(64, 2)) * [covariance / 9, error]
    values += np.array([covariance, squared_norm]) - values.mean(axis=0)
    return [MeasuredStep(*row) for row in values.tolist()]


def test_the_standard_error_is_that_of_the_ratio() -> None:
    noise = summarize(drawn(100.0, 4.0, 1.0))
    assert noise.critical_batch_size == pytest.approx(25)
    relative = math.hypot(1 / 9, 1 / 4) / 8
    assert noise.standard_error == pytest.approx(25 * relative, rel=0.2)
    assert str(noise).startswith("critical batch size 25 +- 0.")


def test_a_gradient_that_may_be_zero_leaves_it_unknown() -> None:
    noise = summarize(drawn(100.0, 4.0, 20.0))
    assert noise.critical_batch_size is None
    assert str(noise) == "critical batch size unknown (measured in 64 steps)"
    assert summarize(drawn(100.0, 4.0, 12.0)).critical_batch_size is not None
    assert summarize(drawn(100.0, 4.0, 1.0)[:7]).critical_batch_size is None
    assert summarize([]).num_steps == 0


@pytest.mark.parametrize(
    ("covariance", "squared_norm", "gain"),
    [(0.0, 1.0, 1.0), (1.0, 0.0, 4.0), (1.0, -1.0, 4.0), (8.0, 1.0, 1.6)],
)
def test_the_gain_lies_between_one_and_the_ratio_of_sizes(
    covariance: float, squared_norm: float, gain: float
) -> None:
    assert Noise(9, covariance, squared_norm).gain(32, base=8) == pytest.approx(gain)


def test_nothing_is_gained_before_anything_was_measured() -> None:
    assert summarize([]).gain(32, base=8) == 1
