"""Which checkpoints stay: the newest, every n-th, and the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Keeping:
    """The rule by which old checkpoints go.

    Attributes:
        last: How many of the newest good ones stay.
        every: Those whose number divides by it stay for ever; None for none.
        best: A value's name, and "max" or "min": the good one in which it was best
            stays. Of equals the oldest, so that a best value so far names the
            checkpoint in which it was reached.
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep={self.last}: at least 1 checkpoint must be kept")

    def choose(
        self,
        numbers: Iterable[int],
        *,
        is_good: Callable[[int], bool],
        value_of: Callable[[int], float | None],
    ) -> set[int]:
        """Return the numbers that stay.

        Args:
            numbers: All that there are, the newest first.
            is_good: Asked of no more of them than needed, since it costs.
            value_of: The best value's, None for one without.
        """
        every = list(numbers)
        stay = self._newest(every, is_good)
        if self.every is not None:
            stay |= {number for number in every if number % self.every == 0}
        if self.best is not None:
            stay |= self._best(every, is_good, value_of)
        return stay

    def _newest(self, numbers: list[int], is_good: Callable[[int], bool]) -> set[int]:
        stay: set[int] = set()
        num_good = 0
        for number in numbers:
            if num_good == self.last:
                break
            stay.add(number)
            num_good += is_good(number)
        return stay

    def _best(
        self,
        numbers: list[int],
        is_good: Callable[[int], bool],
        value_of: Callable[[int], float | None],
    ) -> set[int]:
        assert self.best is not None
        sign = -1 if self.best[1] == "max" else 1
        ranked = sorted(
            (sign * value, number)
            for number in numbers
            if (value := value_of(number)) is not None
        )
        return {next((n for _, n in ranked if is_good(n)), -1)} - {-1}
