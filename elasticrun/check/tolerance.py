"""How much a field may differ when only rounding does: measured, not guessed."""

from __future__ import annotations

import math
import sys
from typing import Any

from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.moments import Key

# One perturbed run is only one sample of what rounding does to a field, and what it
# left alone by chance still has the precision of its numbers.
_TIMES_SEEN = 4.0
_TIMES_PRECISION = 64.0
_TIMES_PRECISION_OF_FLOATS = 8.0
_SINGLE_PRECISION = 2.0**-23


# How far rounding moves a field at a moment; what is missing is not moved at all, so a
# number there is compared exactly.
Tolerances = dict[tuple[Key | None, str], float]


def tolerances_of(baseline: CheckedRun, perturbed: CheckedRun) -> Tolerances:
    """Return how far each field is moved.

    Args:
        perturbed: The same run, with parameters moved by a rounding error after each
            batch.
    """
    moved = perturbed.compared
    return {
        (key, name): distance(value, moved[key].fields.get(name))
        for key, moment in baseline.compared.items()
        if key in moved
        for name, value in moment.fields.items()
    }


def is_within(one: Any, other: Any, moved: float) -> bool:
    """Return whether two values differ by no more than rounding explains.

    Args:
        moved: How far rounding moves such a value.
    """
    return distance(one, other) <= _TIMES_SEEN * moved + _floor(one, moved)


def distance(one: Any, other: Any) -> float:
    """Return how far two fields are apart; infinite if they cannot be near."""
    if one == other:
        return 0.0
    if _is_number(one) and _is_number(other):
        return abs(float(one) - float(other))
    if _is_numbers(one) and _is_numbers(other) and len(one) == len(other):
        return max(distance(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and "sketch" in one:
        if one["tensor"] != other.get("tensor"):
            return math.inf
        pairs = list(zip(one["sketch"], other["sketch"], strict=True))
        apart = math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))
        return max(apart, distance(one["norm"], other["norm"]))
    return math.inf


def _floor(value: Any, moved: float) -> float:
    """Return how far apart two values may be whatever was measured."""
    if isinstance(value, dict) and "sketch" in value:
        return float(_TIMES_PRECISION * value["eps"] * value["norm"])
    if isinstance(value, float):
        # What came from tensors of single precision has no more than that.
        if moved > 0:
            return _TIMES_PRECISION * _SINGLE_PRECISION * abs(value)
        return _TIMES_PRECISION_OF_FLOATS * sys.float_info.epsilon * abs(value)
    return 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))
