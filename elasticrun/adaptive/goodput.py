"""Finds the global batch size that makes the most progress in a given time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.step_time import StepTime

_MOST_SIZES = 1 << 17  # More are looked at one in several, a ten-thousandth apart.


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
