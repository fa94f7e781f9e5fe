"""Passes over the data one after another, each in an order of its own, without end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticrun.data.order.plan import Order


class Passes:
    """The order of endless passes: place p is place p mod length of pass p div length.

    Nothing before a place is computed, however many passes lie before it.

    Args:
        length: Places in one pass.
        order_of_pass: Returns the order of a pass by its number.
        start: The place at which position 0 of this order is.
    """

    def __init__(
        self, length: int, order_of_pass: Callable[[int], Order], *, start: int = 0
    ) -> None:
        self._length = length
        self._order_of_pass = order_of_pass
        self._start = start

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the data-set indices at positions."""
        numbers, places = np.divmod(positions + self._start, self._length)
        indices = np.empty_like(places)
        for number in np.unique(numbers):
            own = numbers == number
            indices[own] = self._order_of_pass(int(number))(places[own])
        return indices
