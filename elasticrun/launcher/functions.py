"""Functions and their results as files, in a folder that only their user can read."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FUNCTION = "function.pickle"
_RESULT = re.compile(r"result-(\d+)-(\d+)\.pickle")


def keep_function(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Keep what every replica is to call."""
    import cloudpickle

    (folder / _FUNCTION).write_bytes(cloudpickle.dumps((function, args)))


def call_function(folder: Path, *, generation: int, rank: int) -> None:
    """Call the function, and keep what it returns; in a replica."""
    import cloudpickle

    function, args = pickle.loads((folder / _FUNCTION).read_bytes())
    result = function(*args)
    path = folder / f"result-{generation}-{rank}.pickle"
    path.write_bytes(cloudpickle.dumps(result))


def read_results(folder: Path) -> list[Any]:
    """Return the results by rank of the last generation, the one that finished."""
    found = [
        (int(match[1]), int(match[2]), path)
        for path in folder.iterdir()
        if (match := _RESULT.fullmatch(path.name))
    ]
    last = max(generation for generation, _, _ in found)
    return [
        pickle.loads(path.read_bytes())
        for generation, _, path in sorted(found)
        if generation == last
    ]
