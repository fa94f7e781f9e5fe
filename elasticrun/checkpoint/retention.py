"""Which checkpoints are kept: the newest, every n-th, and the best."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class RetentionPolicy:
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
        stay: set[int] = set()
        num_good = 0
        for number in every:
            if num_good == self.last:
                break
            stay.add(number)
            num_good += is_good(number)
        if self.every is not None:
            stay |= {number for number in every if number % self.every == 0}
        if self.best is not None:
            sign = -1 if self.best[1] == "max" else 1
            ranked = sorted(
                (sign * value, number)
                for number in every
                if (value := value_of(number)) is not None
            )
            good = (number for _, number in ranked if is_good(number))
            stay |= set(islice(good, 1))
        return stay


def parse_keep(value: int | str, *, setting: str) -> int:
    """Return how many checkpoints to keep.

    Args:
        setting: What to call it in an error.

    Raises:
        ValueError: `value` is not a whole number from 1 up.
    """
    keep = parse_whole_number(value)
    if keep < 1:
        raise ValueError(
            f"{setting} is {value!r}; give how many checkpoints to keep, at least 1."
        )
    return keep


def parse_keep_every(value: int | str | None, *, setting: str) -> int | None:
    """Return whose multiples stay for ever, None for no checkpoint.

    Raises:
        ValueError: `value` is not a whole number from 1 up.
    """
    if value is None:
        return None
    every = parse_whole_number(value)
    if every < 1:
        raise ValueError(
            f"{setting} is {value!r}; give a whole number n from 1 up: every n-th "
            "checkpoint stays for ever."
        )
    return every


def parse_keep_best(
    value: tuple[str, str] | str | None, *, setting: str
) -> tuple[str, str] | None:
    """Return a value's name, and "max" or "min".

    Raises:
        ValueError: `value` is no such pair, nor one as text like "accuracy:max".
    """
    if value is None:
        return None
    pair: Any = value.split(":") if isinstance(value, str) else value
    if (
        not (isinstance(pair, (tuple, list)) and len(pair) == 2)
        or not (isinstance(pair[0], str) and pair[0])
        or pair[1] not in ("max", "min")
    ):
        raise ValueError(
            f"{setting} is {value!r}; give the name of a value in Variables and 'max' "
            "or 'min', like ('accuracy', 'max') or 'accuracy:max'."
        )
    return pair[0], pair[1]


def parse_whole_number(value: Any) -> int:
    """Return a whole number, given as one or as text; 0 for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0
