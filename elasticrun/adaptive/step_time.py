"""Predicts how long a step takes, from steps that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_MOST_OVERLAP = 10.0  # Of the exponent; more is the maximum, as far as anyone can tell.
_STIFFNESS = 0.02  # How much a parameter that no step tells of keeps to its start.
_NUM_ROUNDS = 60
_SMALLEST_GAIN = 1e-10  # Of a round; what comes after is not worth its time.


class TimedSteps(NamedTuple):
    """Steps of one kind.

    Attributes:
        num_nodes: Machines.
        num_replicas: On all of them.
        size: Samples in a micro-batch of the replica that has most, in the mean.
        num_micro: Micro-batches in a step.
        seconds: What a step took; any other unit will do for all.
    """

    num_nodes: int
    num_replicas: int
    size: float
    num_micro: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """A model of how long a step takes.

    That of AdaptDL (Qiao et al. 2021, Pollux, section 3.2): a micro-batch computes for
    `constant + each * size`. The replicas then average gradients, for `link + more *
    (replicas - 2)`, which on several nodes has numbers of its own. The last micro-batch
    of a step overlaps with that: together they take the p-norm of both, from p = 1, one
    after the other, to p = 10, at the same time.

    Attributes:
        parameters: constant, each; link, more within a node; link, more between nodes;
            p.
    """

    parameters: tuple[float, ...]

    def __call__(
        self, num_nodes: Any, num_replicas: Any, size: Any, num_micro: Any
    ) -> Any:
        """Return how long steps take; numbers or arrays, in the unit of the fit."""
        return _predict(
            np.array(self.parameters)[:, None],
            *np.atleast_1d(num_nodes, num_replicas, size, num_micro),
        ).reshape(np.broadcast(num_nodes, num_replicas, size, num_micro).shape)


@np.errstate(all="ignore")  # Of points that are tried and not taken.
def fit(steps: Sequence[TimedSteps]) -> StepTime:
    """Return the model that is nearest to steps that were timed, at least one.

    Residuals are those of logarithms, so that short steps count as much as long ones.
    By Levenberg's and Marquardt's method, from several starts at once, all of which are
    made from the times themselves: any unit will do. What no step tells of, as the link
    where one replica has trained, stays near its start, where it takes little.
    """
    columns = np.array([step[:4] for step in steps], dtype=np.float64).T
    observed = np.log([step.seconds for step in steps])
    starts = _starts(columns, float(np.exp(np.median(observed))))

    def residuals(points: Values) -> Values:
        predicted = _predict(_decoded(points.T)[:, :, None], *columns)
        apart = np.log(predicted) - observed
        return np.concatenate([apart, _STIFFNESS * (points - starts)], axis=1)

    points = _minimize(residuals, starts)
    best = points[np.argmin((residuals(points) ** 2).sum(axis=1))]
    decoded = _decoded(best)
    if columns[0].max() == 1:
        decoded[4:6] = decoded[2:4]  # Nodes that nobody has seen are linked alike.
    return StepTime(tuple(decoded.tolist()))


def seconds_of(
    steps: Sequence[TimedSteps], replicas: int, batch_size: int
) -> float | None:
    """Return how long steps took with so many replicas and samples; None if unknown."""
    local_size = -(-batch_size // replicas)
    for step in reversed(steps):  # The newest ones.
        own_size = round(step.size * step.num_micro)
        if (step.num_replicas, own_size) == (replicas, local_size):
            return step.seconds
    return None


def _predict(
    parameters: Values, num_nodes: Any, num_replicas: Any, size: Any, num_micro: Any
) -> Values:
    constant, each, link, more, node_link, node_more, power = parameters
    computing = constant + each * size
    more_replicas = np.maximum(num_replicas - 2, 0)
    within = np.where(num_replicas > 1, link + more * more_replicas, 0.0)
    between = node_link + node_more * more_replicas
    linking = np.where(num_nodes > 1, between, within)
    longest = np.maximum(computing, linking)
    norm = (computing / longest) ** power + (linking / longest) ** power
    last = longest * norm ** (1 / power)
    seconds: Values = (num_micro - 1) * computing + last
    return seconds


def _decoded(points: Values) -> Values:
    """Return parameters: powers of e, and of the last one what is within its bounds."""
    last = 1 + (_MOST_OVERLAP - 1) / (1 + np.exp(-points[6:]))
    return np.concatenate([np.exp(points[:6]), last])


def _starts(columns: Values, typical: float) -> Values:
    """Return points to begin with, of which one lies in the right valley."""
    size, num_micro = np.median(columns[2]), np.median(columns[3])
    num_more = max(float(columns[1].max()) - 2, 1.0)
    starts = []
    for constant in (0.1, 0.5, 0.9):
        for link in (0.02, 0.3, 1.0):
            for overlap in (-2.0, 0.0):
                computing = typical / num_micro / (1 + link)
                linking = [link * computing, 0.1 * link * computing / num_more]
                values = [constant * computing, (1 - constant) * computing / size]
                starts.append([*np.log([*values, *linking, *linking]), overlap])
    return np.array(starts)


def _minimize(residuals: Any, points: Values) -> Values:
    """Return points at which the sum of the squares of residuals is least nearby."""
    num_points, num_parameters = points.shape
    damping = np.full(num_points, 1e-2)
    steps = 1e-5 * np.eye(num_parameters)
    now = residuals(points)
    sums = (now**2).sum(axis=1)
    for _ in range(_NUM_ROUNDS):
        slopes = np.stack([(residuals(points + s) - now) / 1e-5 for s in steps], axis=2)
        squares = slopes.transpose(0, 2, 1) @ slopes
        downhill = -(slopes.transpose(0, 2, 1) @ now[:, :, None])
        scale = damping[:, None, None] * (np.eye(num_parameters) * (squares + 1e-9))
        moves = np.linalg.solve(squares + scale, downhill)[:, :, 0]
        tried = points + np.clip(moves, -2, 2)
        then = residuals(tried)
        sums_then = (then**2).sum(axis=1)
        is_better = sums_then < sums
        is_over = sums - sums_then < _SMALLEST_GAIN
        damping = np.where(is_better, damping / 5, damping * 5)
        if np.all(is_over & is_better | (damping > 1e9)):
            break
        points = np.where(is_better[:, None], tried, points)
        now = np.where(is_better[:, None], then, now)
        sums = np.where(is_better, sums_then, sums)
    return points
