"""Which checkpoints are kept: the newest good ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any


def newest_to_keep(
    numbers: Iterable[int], keep: int, *, is_good: Callable[[int], bool]
) -> set[int]:
    """Return the numbers that stay: down to the last of so many good ones.

    Args:
        numbers: All that there are, the newest first.
        is_good: Asked of no more of them than needed, since it costs.
    """
    stay: set[int] = set()
    num_good = 0
    for number in numbers:
        if num_good == keep:
            break
        stay.add(number)
        num_good += is_good(number)
    return stay


def parse_keep(value: int | str, *, setting: str) -> int:
    """Return how many checkpoints to keep."""
    keep = parse_whole_number(value)
    if keep < 1:
        raise ValueError(
            f"{setting} is {value!r}; give how many checkpoints to keep, at least 1."
        )
    return keep


def parse_whole_number(value: Any) -> int:
    """Return a whole number, given as one or as text; 0 for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0
