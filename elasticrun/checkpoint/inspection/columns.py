"""Values as readable text: columns, sizes, times, positions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elasticrun.checkpoint.position import Position
from elasticrun.errors import CheckpointError

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def columns(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Return lines in which the cells of all rows stand below one another.

    Args:
        right: The columns to align on their right.
    """
    table = [list(row) for row in rows]
    on_the_right = set(right)
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in on_the_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with three digits or so."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in _UNITS:
        value /= 1024
        if value < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:.{1 if value < 100 else 0}f} {unit}"


def time_text(seconds: float) -> str:
    """Return the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def position_text(values: Mapping[str, Any]) -> str:
    """Return the place in the program that a manifest gives."""
    if not values:
        return "-"
    try:
        return str(Position.decode(dict(values)))
    except CheckpointError:  # Not of a job's making.
        return ", ".join(f"{key} {value}" for key, value in values.items())
