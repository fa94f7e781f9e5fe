"""What a loaded state must look like, so that damage shows at the load.

A state says it as a value that looks alike: a dictionary has these keys, a list any
number of items of one kind, a tuple a row of just these, and leaves are of a `Kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from elasticrun.errors import CheckpointError

_MOST_SHOWN = 80


class Kind(NamedTuple):
    """A kind of plain value, as an error calls it."""

    words: str
    fits: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and _is_count(abs(value))  # What torch takes of them.


COUNT = Kind("a whole number from 0 up", _is_count)
SIZE = Kind("a whole number from 1 up", lambda value: _is_count(value) and value > 0)
NUMBER = Kind("a finite number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
WHOLE = Kind("a whole number", lambda value: type(value) is int)
TEXT = Kind("text", lambda value: type(value) is str)
FLAG = Kind("True or False", lambda value: type(value) is bool)
MAPPING = Kind("a dictionary", lambda value: type(value) is dict)


def or_none(kind: Kind) -> Kind:
    """Return the kind of values that may be missing."""
    return Kind(
        f"{kind.words}, or None", lambda value: value is None or kind.fits(value)
    )


# Of loaders, which a job loads and the command line shows.
SIZES = [(COUNT, SIZE)]
STEP_TIMES = {
    "batch_size": SIZE,
    "max_local_batch_size": or_none(SIZE),
    "max_batch_size": or_none(SIZE),
    "min_efficiency": NUMBER,
    "steps": [(SIZE, SIZE, POSITIVE, SIZE, POSITIVE)],
}


def check_values(values: Any, expected: Any, *, name: str) -> None:
    """Refuse values that do not look as expected."""
    if isinstance(expected, Kind):
        if not expected.fits(values):
            raise misfit(name, values, expected.words)
    elif isinstance(expected, dict):
        if type(values) is not dict or values.keys() != expected.keys():
            keys = ", ".join(map(str, expected))
            raise misfit(name, values, f"a dictionary of {keys}")
        for key, inner in expected.items():
            check_values(values[key], inner, name=f"{name}.{key}")
    else:
        is_row = isinstance(expected, tuple)
        if type(values) not in (list, tuple):
            raise misfit(name, values, "a list")
        if is_row and len(values) != len(expected):
            raise misfit(name, values, f"a list of {len(expected)}")
        each = expected if is_row else [expected[0]] * len(values)
        for number, (value, inner) in enumerate(zip(values, each, strict=True)):
            check_values(value, inner, name=f"{name}[{number}]")


def misfit(name: str, value: Any, wanted: str) -> CheckpointError:
    """Return the error for a value at a place of a state, such as `loader.steps[2]`."""
    shown = repr(value)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    return CheckpointError(
        f"the saved {name} is {shown}, but must be {wanted}. The state was not written "
        "by elasticrun, or was changed. Remove that checkpoint, and the job goes on "
        "from the one before, or start anew with another checkpoint directory."
    )
