"""How much a field may differ when only rounding does: measured, not guessed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from elasticrun.check.runs.moments import Key, Moment, compared

# One perturbed run is one sample of what rounding does to a field.
_TIMES_SEEN = 4.0
_TIMES_PRECISION = 64.0
_TIMES_PRECISION_OF_FLOATS = 8.0
_SINGLE_PRECISION = 2.0**-23


class Tolerance(NamedTuple):
    """How far a field may be from the baseline.

    Attributes:
        distance: What rounding errors in each step moved it by; 0 if nothing, so that
            a number is compared exactly.
    """

    distance: float


class Tolerances:
    """What rounding does to each field at each moment.

    Made from the baseline, and from the same run with parameters moved by a rounding
    error after each batch.
    """

    def __init__(self, baseline: Iterable[Moment], perturbed: Iterable[Moment]) -> None:
        self._seen: dict[tuple[Key, str], Tolerance] = {}
        moved = compared(perturbed, last_leg=0)
        for key, moment in compared(baseline, last_leg=0).items():
            other = moved.get(key)
            for name, value in moment.fields.items() if other else ():
                assert other is not None
                gap = distance(value, other.fields.get(name))
                if gap:
                    self._seen[key, name] = Tolerance(gap)

    def of(self, key: Key | None, name: str) -> Tolerance:
        """Return the tolerance of one field at one moment."""
        return self._seen.get((key, name), Tolerance(0.0)) if key else Tolerance(0.0)


def is_within(one: Any, other: Any, tolerance: Tolerance) -> bool:
    """Return whether two values differ by no more than rounding explains."""
    gap = distance(one, other)
    return gap <= _TIMES_SEEN * tolerance.distance + _floor(one, tolerance)


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


def _floor(value: Any, tolerance: Tolerance) -> float:
    if isinstance(value, dict) and "sketch" in value:
        return float(_TIMES_PRECISION * value["eps"] * value["norm"])
    if isinstance(value, float):
        # What came from tensors of single precision has no more than that.
        if tolerance.distance > 0:
            return _TIMES_PRECISION * _SINGLE_PRECISION * abs(value)
        return _TIMES_PRECISION_OF_FLOATS * sys.float_info.epsilon * abs(value)
    return 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))
