"""The size of global batches that makes the most of the time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from elasticrun.adaptive.goodput import Choice, choose
from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.step_time import StepTime


class Case:
    """A job, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        times = 10 ** generator.uniform(-4, 0, 6)
        self.step_time = StepTime((*times.tolist(), generator.uniform(1, 10)))
        self.base = int(generator.integers(4, 64))
        critical = self.base * 10 ** generator.uniform(-1, 3)
        self.noise = Noise(64, critical, 1.0)
        self.largest = self.base * int(generator.integers(2, 64))
        self.num_nodes = int(generator.integers(1, 4))
        self.num_replicas = self.num_nodes * int(generator.integers(1, 5))
        self.most = int(generator.integers(2, 40))

    def choose(self, noise: Noise | None = None) -> Choice:
        return choose(
            self.step_time,
            noise or self.noise,
            base=self.base,
            sizes=range(self.base, self.largest + 1),
            num_nodes=self.num_nodes,
            num_replicas=self.num_replicas,
            max_local_batch_size=self.most,
        )

    def brute_force(self) -> float:
        """Return the most goodput of any number of micro-batches of any size."""
        num_micro, size = np.meshgrid(
            np.arange(1, self.largest + 1), np.arange(1, self.most + 1)
        )
        batch_size = num_micro * size * self.num_replicas
        fits = (batch_size >= self.base) & (batch_size <= self.largest)
        if not fits.any():
            return 0.0
        num_micro, size, batch_size = num_micro[fits], size[fits], batch_size[fits]
        seconds = self.step_time(self.num_nodes, self.num_replicas, size, num_micro)
        gain = self.noise.gain(batch_size, base=self.base)
        return float((gain * self.base / seconds).max())


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_better_by_brute_force(seed: int) -> None:
    case = Case(seed)
    chosen = case.choose()
    assert chosen.goodput >= 0.995 * case.brute_force()
    assert case.base <= chosen.batch_size <= case.largest
    local = -(-chosen.batch_size // case.num_replicas)
    assert chosen.num_micro == -(-local // case.most)


def test_more_noise_never_makes_a_batch_smaller() -> None:
    num_growing = 0
    for seed in range(50):
        case = Case(seed)
        sizes = [
            case.choose(dataclasses.replace(case.noise, covariance=noise)).batch_size
            for noise in np.geomspace(1e-2, 1e6, 60).tolist()
        ]
        assert sizes == sorted(sizes)
        num_growing += sizes[0] < sizes[-1]
    assert num_growing > 40


def test_one_of_many_sizes_is_as_good_as_any() -> None:
    noise = Noise(64, 3e5, 1.0)
    options = {"base": 64, "num_nodes": 1, "num_replicas": 1}
    step_time = StepTime((0.1, 1e-6, 0.1, 0.1, 0.1, 0.1, 1.0))
    chosen = choose(
        step_time, noise, sizes=range(64, 10**7), max_local_batch_size=None, **options
    )
    expected = (3e5 * 0.1 / 1e-6) ** 0.5  # Where goodput's derivative is 0.
    assert chosen.batch_size == pytest.approx(expected, rel=1e-3)
