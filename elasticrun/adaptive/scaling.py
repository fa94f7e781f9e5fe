"""How fast each number of replicas trains, measured or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elasticrun.adaptive.goodput import choose
from elasticrun.adaptive.noise import Noise
from elasticrun.adaptive.step_time import TimedSteps, fit, seconds_of

MEASURED, PREDICTED, NOT_MEASURED = "measured", "predicted", "not measured"
_MOST_GROWTH = 2  # Of what was seen: the model knows little of more.


class Scaling(NamedTuple):
    """What a number of replicas gives; None where that is not known.

    Attributes:
        basis: Whether steps with so many replicas, and batches of this size, were
            timed; or are predicted; or neither.
        batch_size: Samples in a global batch: the one with the most goodput, if the job
            decides that.
        efficiency: What a sample is worth in such a batch, of one in a batch of the
            first size.
        goodput: Samples a second, each by what it is worth.
        speedup: Of goodput, or of throughput where that is not known, over one replica;
            or over the fewest that there is a row for, each of which counts as 1 then.
    """

    replicas: int
    basis: str = NOT_MEASURED
    batch_size: int | None = None
    samples_per_second: float | None = None
    efficiency: float | None = None
    goodput: float | None = None
    speedup: float | None = None


def scaling_of(
    steps: Sequence[TimedSteps],
    noise: Noise,
    *,
    base: int,
    batch_size: int,
    max_batch_size: int | None = None,
    max_local_batch_size: int | None = None,
    min_efficiency: float = 0.0,
) -> list[Scaling]:
    """Return a row for each number of replicas up to twice the most that were timed.

    Below half of the fewest that were timed, nothing is known either.
    """
    least = min(step.num_replicas for step in steps)
    most = max(step.num_replicas for step in steps)
    on_a_node = max(-(-step.num_replicas // step.num_nodes) for step in steps)
    is_known = noise.critical_batch_size is not None
    sizes = range(batch_size, batch_size + 1)
    if max_batch_size is not None and is_known:
        sizes = range(base, min(max_batch_size, _MOST_GROWTH * batch_size) + 1)
    step_time = fit(steps)
    rows: list[Scaling] = []
    worth_of_one = None
    for replicas in range(1, _MOST_GROWTH * most + 1):
        if _MOST_GROWTH * replicas < least:
            rows.append(Scaling(replicas))
            continue
        best = choose(
            step_time,
            noise,
            base=base,
            sizes=sizes,
            num_nodes=-(-replicas // on_a_node),
            num_replicas=replicas,
            max_local_batch_size=max_local_batch_size,
            min_efficiency=min_efficiency,
        )
        seconds = seconds_of(steps, replicas, best.batch_size)
        throughput = best.batch_size / seconds if seconds else best.throughput
        goodput = throughput * best.efficiency if is_known else None
        worth = throughput if goodput is None else goodput
        worth_of_one = worth_of_one or worth / replicas
        rows.append(
            Scaling(
                replicas,
                MEASURED if seconds else PREDICTED,
                best.batch_size,
                throughput,
                best.efficiency if is_known else None,
                goodput,
                worth / worth_of_one,
            )
        )
    return rows
