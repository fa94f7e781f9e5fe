"""Sums of numbers without rounding, so that their order does not matter."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

# Every finite double is an integer multiple of 2**-1074.
_EXPONENT = 1074


class ExactSum:
    """A sum that is rounded once, when it is read.

    So it is the same however the numbers are dealt out to replicas and generations.
    The sum of integers is an integer; with a float it is the double next to the exact
    sum; infinities and NaN act as in floating point.
    """

    __slots__ = ("_is_float", "_scaled", "_special")

    def __init__(self) -> None:
        self._scaled = 0
        self._is_float = False
        self._special = 0.0

    @classmethod
    def of(cls, number: Any) -> ExactSum:
        """Return the sum of one number."""
        total = cls()
        total.add(number)
        return total

    def add(self, number: Any, *, sign: int = 1) -> None:
        """Add an integer, a float, or what has one value of these (a 0-d tensor)."""
        number = _plain(number)
        if isinstance(number, int):
            self._scaled += sign * number << _EXPONENT
            return
        self._is_float = True
        if not math.isfinite(number):
            self._special += sign * number
            return
        numerator, denominator = number.as_integer_ratio()
        self._scaled += sign * numerator << _EXPONENT + 1 - denominator.bit_length()

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self._scaled += other._scaled
        self._is_float |= other._is_float
        self._special += other._special

    @property
    def value(self) -> int | float:
        """The sum: an integer of integers, else the nearest double."""
        if not self._is_float:
            return self._scaled >> _EXPONENT
        if self._special != 0.0:
            return self._special
        try:
            return self._scaled / (1 << _EXPONENT)
        except OverflowError:
            return math.inf if self._scaled > 0 else -math.inf

    def encode(self) -> list[Any]:
        """Return the sum as values that JSON has."""
        special = repr(self._special) if self._special != 0.0 else ""
        return [hex(self._scaled), self._is_float, special]

    @classmethod
    def decode(cls, values: list[Any]) -> ExactSum:
        """Return the sum that `encode` wrote."""
        total = cls()
        scaled, total._is_float, special = values
        total._scaled = int(scaled, 16)
        total._special = float(special or 0.0)
        return total


def _plain(number: Any) -> int | float:
    """Return a number as Python's own."""
    if isinstance(number, (int, float)):
        return number
    item = getattr(number, "item", None)
    if item is not None and math.prod(getattr(number, "shape", ())) == 1:
        number = item()
    if isinstance(number, Integral):
        return int(number)
    if isinstance(number, float):
        return number
    raise TypeError(
        f"{number!r} ({type(number).__name__}) is not one real number. Add up "
        "integers, floats, or tensors and arrays of one element."
    )
