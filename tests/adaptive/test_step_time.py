"""The model of how long a step takes, fitted to noisy times."""

from __future__ import annotations

import numpy as np
import pytest

from elasticrun.adaptive.step_time import StepTime, TimedSteps, fit

KINDS = [
    (num_nodes, num_replicas, size, num_micro)
    for num_nodes, num_replicas in [(1, 1), (1, 2), (1, 4), (2, 4), (2, 8)]
    for size in (8, 32, 64, 128)
    for num_micro in (1, 2)
]
UNITS = {"seconds": 1.0, "milliseconds": 1e3, "kiloseconds": 1e-3}
# constant, each; link, more within a node; link, more between nodes; p.
SYSTEMS = {
    "computing": (0.02, 0.004, 0.01, 0.001, 0.03, 0.002, 2.0),
    "linked": (0.03, 0.0004, 0.05, 0.004, 0.3, 0.02, 1.2),
    "overlapping": (0.05, 0.002, 0.1, 0.005, 0.2, 0.01, 6.0),
}


def timed(model: StepTime, generator: np.random.Generator) -> list[TimedSteps]:
    """Return times that are 3 % off."""
    errors = np.exp(generator.normal(0, 0.03, len(KINDS)))
    return [
        TimedSteps(*kind, float(model(*kind)) * error)
        for kind, error in zip(KINDS, errors.tolist(), strict=True)
    ]


def misfit(model: StepTime, steps: list[TimedSteps]) -> float:
    return sum(np.log(float(model(*step[:4])) / step.seconds) ** 2 for step in steps)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("unit", UNITS)
def test_noisy_times_in_any_unit_give_the_model_back(system: str, unit: str) -> None:
    *times, power = SYSTEMS[system]
    model = StepTime((*(UNITS[unit] * value for value in times), power))
    fitted = fit(timed(model, np.random.default_rng(0)))
    for kind in KINDS:
        assert fitted(*kind) == pytest.approx(model(*kind), rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_no_model_is_nearer_than_the_fitted_one(seed: int) -> None:
    generator = np.random.default_rng(seed)
    computing = generator.uniform(0.01, 0.5)
    constant, link, more = generator.uniform([0.1, 0.05, 0.01], [0.9, 2, 0.2])
    links = np.array([link, link * more]) * computing
    values = [constant * computing, (1 - constant) * computing / 32, *links, *3 * links]
    model = StepTime((*map(float, values), generator.uniform(1, 10)))
    steps = timed(model, generator)
    assert misfit(fit(steps), steps) < misfit(model, steps)


def test_one_kind_of_steps_is_enough() -> None:
    fitted = fit([TimedSteps(1, 1, 16, 1, 0.5)])
    assert fitted(1, 1, 16, 1) == pytest.approx(0.5, rel=0.01)
    assert 0.5 < fitted(1, 1, 32, 1) < 1.0
    assert fitted(1, 1, 16, 2) == pytest.approx(1.0, rel=0.05)


def test_nodes_that_nobody_has_seen_are_linked_as_replicas_are() -> None:
    fitted = fit([TimedSteps(1, r, 16, 1, 0.5 + 0.1 * r) for r in (1, 2, 4)])
    assert fitted(2, 4, 16, 1) == pytest.approx(fitted(1, 4, 16, 1))


def test_arrays_are_predicted_at_once() -> None:
    model = StepTime(SYSTEMS["linked"])
    together = model(1, np.array([1, 2]), np.array([[8], [16]]), 1)
    assert together.shape == (2, 2)
    assert together[1, 0] == pytest.approx(float(model(1, 1, 16, 1)))
