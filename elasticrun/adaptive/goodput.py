"""Finds the global batch size with the most goodput, and decides the next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.step_time import StepTime, TimedSteps, fit, seconds_of

_MOST_SIZES = 1 << 17  # More are looked at one in several, a ten-thousandth apart.
_LEAST_GAIN = 1.05  # Less would not make up for a change of the learning rate.
_MOST_GROWTH = 2  # In one change: the model knows little of what is much larger.
_MOST_TIMED = 6  # Shares from which on the model is trusted.


class Choice(NamedTuple):
    """A size of global batches, and what comes of it.

    Attributes:
        num_micro: Micro-batches of each replica.
        throughput: Samples in a unit of time.
        efficiency: What a sample is worth in a batch of this size, of one in a batch of
            the first size.
    """

    batch_size: int
    num_micro: int
    throughput: float
    efficiency: float

    @property
    def goodput(self) -> float:
        """Samples in a unit of time, each by what it is worth (Pollux, section 3)."""
        return self.throughput * self.efficiency


def choose(
    step_time: StepTime,
    noise: Noise,
    *,
    base: int,
    sizes: range,
    num_nodes: int,
    num_replicas: int,
    max_local_batch_size: int | None,
    min_efficiency: float = 0.0,
) -> Choice:
    """Return the size with the most goodput, the smallest one of equals.

    All sizes are looked at, each in as few micro-batches as it can be cut into: with
    more of them, more time goes by for their constant part, and less of the averaging
    is hidden behind the last one. More noise never makes the choice smaller.

    Args:
        base: The first size of the plan, which efficiency is relative to.
        max_local_batch_size: Samples that fit into a micro-batch; None for any.
        min_efficiency: Sizes whose efficiency is below this are out, but the first.
    """
    candidates = _candidates(sizes)
    local = np.ceil(candidates / num_replicas)
    most = math.inf if max_local_batch_size is None else max_local_batch_size
    num_micro = np.maximum(np.ceil(local / most), 1)
    seconds = step_time(num_nodes, num_replicas, local / num_micro, num_micro)
    throughput = candidates / seconds
    efficiency = noise.gain(candidates, base=base) * base / candidates
    may_be = efficiency >= min_efficiency
    best = int(np.argmax(throughput * efficiency * may_be))
    return Choice(
        int(candidates[best]),
        int(num_micro[best]),
        float(throughput[best]),
        float(efficiency[best]),
    )


def _candidates(sizes: range) -> NDArray[np.float64]:
    if len(sizes) <= _MOST_SIZES:
        return np.array(sizes, dtype=np.float64)
    some = np.geomspace(sizes[0], sizes[-1], _MOST_SIZES)
    return np.unique(some.round())


def next_size(
    steps: Sequence[TimedSteps],
    noise: Noise,
    *,
    base: int,
    size: int,
    largest: int,
    num_nodes: int,
    num_replicas: int,
    max_local_batch_size: int | None,
    min_efficiency: float,
) -> int | None:
    """Return another size than `size`; None if that is right, or nothing is known yet.

    From one size the constant and the slope of a step cannot be told apart. So where
    the model sees nothing better, twice the size is tried once, if it would be better
    by the least time that its steps can take. What they take decides then: a try that
    is worse is taken back.
    """
    if noise.critical_batch_size is None or not seconds_of(steps, num_replicas, size):
        return None
    best_of = partial(
        choose,
        fit(steps),
        noise,
        base=base,
        num_nodes=num_nodes,
        num_replicas=num_replicas,
        max_local_batch_size=max_local_batch_size,
        min_efficiency=min_efficiency,
    )
    top = min(largest, _MOST_GROWTH * size)
    best = best_of(sizes=range(base, top + 1))
    now, then = (best_of(sizes=range(each, each + 1)) for each in (size, top))
    if best.goodput >= _LEAST_GAIN * now.goodput or now.efficiency < min_efficiency:
        return best.batch_size
    own, share = _seconds_by_share(steps, num_replicas), -(-top // num_replicas)
    if len(own) > _MOST_TIMED or share in own or then.efficiency < min_efficiency:
        return None
    most = then.efficiency * top / _least_seconds(own, share)
    return top if most >= _LEAST_GAIN * now.goodput else None


def _seconds_by_share(
    steps: Sequence[TimedSteps], num_replicas: int
) -> dict[int, float]:
    """Return how long steps took, by the largest share that a replica has of them."""
    return {
        round(step.size * step.num_micro): step.seconds
        for step in steps
        if step.num_replicas == num_replicas
    }


def _least_seconds(known: dict[int, float], share: int) -> float:
    """Return what a step with a larger share takes at least.

    A step's time is convex in the share: it goes on as between the two before it, or
    faster. If one is known it may be all constant.
    """
    before = sorted(each for each in known if each < share)[-2:]
    last = known[before[-1]]
    if len(before) == 1:
        return last
    slope = (last - known[before[0]]) / (before[-1] - before[0])
    return last + max(slope, 0.0) * (share - before[-1])
