"""Decides the next size of global batches, from steps that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from elasticrun.adaptive.goodput import choose
from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.scaling import seconds_of
from elasticrun.adaptive.step_time import TimedSteps, fit

_LEAST_GAIN = 1.05  # Less would not make up for a change of the learning rate.
_MOST_GROWTH = 2  # In one change: the model knows little of what is much larger.
_MOST_TIMED = 6  # Shares from which on the model is trusted.


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
