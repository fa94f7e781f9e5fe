"""The noise of gradients, estimated from many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MEASURED_EACH = 32  # Global batches: what is measured costs time.
_FEWEST = 8  # Steps whose spread says something.
_NUM_ERRORS = 2.0  # Standard errors within which a number may as well be 0.


def is_measured(number: int) -> bool:
    """Return whether the step of a global batch is measured, by its number alone."""
    return number % MEASURED_EACH == 0


def num_alike(number: int) -> int:
    """Return how many batches from this one on are all measured, or all not."""
    return 1 if is_measured(number) else MEASURED_EACH - number % MEASURED_EACH


class MeasuredStep(NamedTuple):
    """What one step tells: unbiased, and far from exact.

    Attributes:
        covariance: The trace of the covariance of one sample's gradient.
        squared_norm: That of the true gradient, which may come out below 0.
    """

    covariance: float
    squared_norm: float


def measure_step(
    *, chunk_squares: float, total_square: float, batch_size: int, num_chunks: int
) -> MeasuredStep | None:
    """Return what a step tells, whose global batch was cut into chunks of any sizes.

    It is the analysis of variance of groups; with equal chunks, appendix A.1 of
    McCandlish et al. 2018 (arXiv 1812.06162).

    Args:
        chunk_squares: The squared norms of the chunks' mean gradients, each times its
            share of the samples, added up.
        total_square: The squared norm of the global batch's mean gradient.

    Returns:
        None if there is only one chunk, or a gradient was not finite.
    """
    is_finite = math.isfinite(chunk_squares) and math.isfinite(total_square)
    if num_chunks < 2 or not is_finite:
        return None
    between = (chunk_squares - total_square) / (num_chunks - 1)
    return MeasuredStep(between * batch_size, total_square - between)


@dataclass(frozen=True)
class Noise:
    """The noise of gradients, as measured in some steps.

    Attributes:
        num_steps: How many these are.
        covariance: The trace of the covariance of one sample's gradient; NaN where
            nothing was measured.
        squared_norm: That of the true gradient. Below 0 by chance, where it is small
            beside the noise.
        critical_batch_size: The first over the second: with as many samples in a batch,
            noise and gradient weigh alike. None if it is unknown: there are fewer than
            8 steps, or the squared norm is within two standard errors of 0.
        standard_error: Of the critical batch size, or None.
    """

    num_steps: int
    covariance: float
    squared_norm: float
    critical_batch_size: float | None = None
    standard_error: float | None = None

    def __str__(self) -> str:
        steps = f"measured in {self.num_steps} steps"
        if self.critical_batch_size is None:
            return f"critical batch size unknown ({steps})"
        return (
            f"critical batch size {self.critical_batch_size:.4g} +- "
            f"{self.standard_error:.2g} ({steps})"
        )

    def gain(self, batch_size: Any, *, base: float) -> Any:
        """Return how many steps with batches of `base` samples one step is worth.

        Between 1 and the ratio of the sizes; 1 while nothing was measured. It is the
        gain ratio of AdaScale (Johnson et al. 2020, arXiv 2007.05105).
        """
        covariance, squared_norm = max(self.covariance, 0), max(self.squared_norm, 0)
        if not self.num_steps or covariance == squared_norm == 0:
            return 1.0
        return (covariance / base + squared_norm) / (
            covariance / batch_size + squared_norm
        )


def summarize_newest(steps: Sequence[MeasuredStep]) -> Noise:
    """Return the noise that the newer half of steps tells, or the 8 newest ones.

    Gradients of the beginning, which are larger by far, are soon forgotten so.
    """
    return summarize(steps[min(len(steps) // 2, max(len(steps) - _FEWEST, 0)) :])


def summarize(steps: Sequence[MeasuredStep]) -> Noise:
    """Return the noise that steps tell together.

    Means are taken apart, and then their ratio: a mean of ratios would be biased. The
    standard error of that is by the first derivatives.
    """
    if not steps:
        return Noise(0, math.nan, math.nan)
    values = np.array(steps, dtype=np.float64)
    covariance, squared_norm = values.mean(axis=0).tolist()
    if len(steps) < _FEWEST:
        return Noise(len(steps), covariance, squared_norm)
    of_means = np.cov(values.T) / len(steps)
    if squared_norm <= _NUM_ERRORS * math.sqrt(of_means[1, 1]):
        return Noise(len(steps), covariance, squared_norm)
    slope = np.array([1.0, -covariance / squared_norm]) / squared_norm
    return Noise(
        len(steps),
        covariance,
        squared_norm,
        covariance / squared_norm,
        math.sqrt(slope @ of_means @ slope),
    )
