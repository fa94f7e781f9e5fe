"""The sizes that a job comes to, which knows of steps only what it has timed."""

from __future__ import annotations

import numpy as np
import pytest

from elasticrun.adaptive.goodput import choose, next_size
from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.step_time import StepTime, TimedSteps

SPREAD = 0.02  # Of a median of times.


def settled(seed: int) -> float:
    """Return what a job's last size is worth, of the best of all sizes."""
    generator = np.random.default_rng(seed)
    times = 10 ** generator.uniform(-4, 0, 6)
    step_time = StepTime((*times.tolist(), generator.uniform(1, 10)))
    base = int(generator.integers(4, 64))
    critical = base * 10 ** generator.uniform(-1, 3)
    noise = Noise(64, critical, 1.0, critical, 1.0)
    largest = base * int(generator.integers(2, 64))
    num_nodes = int(generator.integers(1, 4))
    num_replicas = num_nodes * int(generator.integers(1, 5))
    most = int(generator.integers(2, 40))

    def best_of(sizes: range) -> tuple[float, int, float]:
        best = choose(
            step_time,
            noise,
            base=base,
            sizes=sizes,
            num_nodes=num_nodes,
            num_replicas=num_replicas,
            max_local_batch_size=most,
        )
        return best.goodput, best.num_micro, best.batch_size / best.throughput

    size, timed = base, dict[int, TimedSteps]()
    for _ in range(20):
        _, num_micro, seconds = best_of(range(size, size + 1))
        share = -(-size // num_replicas) / num_micro
        seconds *= float(np.exp(generator.normal(0, SPREAD)))
        timed.pop(size, None)
        timed[size] = TimedSteps(num_nodes, num_replicas, share, num_micro, seconds)
        decided = next_size(
            [*timed.values()],
            noise,
            base=base,
            size=size,
            largest=largest,
            num_nodes=num_nodes,
            num_replicas=num_replicas,
            max_local_batch_size=most,
            min_efficiency=0.0,
        )
        if decided is None:
            break
        size = decided
    return best_of(range(size, size + 1))[0] / best_of(range(base, largest + 1))[0]


@pytest.mark.parametrize("num_jobs", [10, pytest.param(100, marks=pytest.mark.wide)])
def test_a_job_settles_near_the_best_size(num_jobs: int) -> None:
    worth = sorted(settled(seed) for seed in range(num_jobs))
    assert worth[0] >= 0.9
    assert worth[num_jobs // 20] >= 0.95
