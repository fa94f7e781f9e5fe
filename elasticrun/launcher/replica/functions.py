"""Functions and their results in files that only their user can read."""

from __future__ import annotations

import io
import linecache
import marshal
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from elasticrun.errors import ElasticRunError

_FUNCTION = "function.pickle"
_RESULT = re.compile(r"result-(\d+)-(\d+)-of-(\d+)\.pickle")


def save_function(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Save the function that every replica is to call."""
    import cloudpickle

    sources: dict[str, list[str]] = {}  # A notebook's cells are in no file.

    def reduce(code: CodeType) -> tuple[Any, ...]:
        """Keep the file's name, without which tracebacks show no line."""
        name = code.co_filename
        if not os.path.exists(name):
            sources[name] = linecache.getlines(name)
        return marshal.loads, (marshal.dumps(code),)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
            {CodeType: reduce}
        )

    file = io.BytesIO()
    Pickler(file).dump((function, args))
    whole = pickle.dumps((sys.argv, sources, file.getvalue()))
    (folder / _FUNCTION).write_bytes(whole)


def call_function(folder: Path) -> object:
    """Call the function; in a replica."""
    argv, sources, called = pickle.loads((folder / _FUNCTION).read_bytes())
    sys.argv = argv
    for name, lines in sources.items():
        linecache.cache[name] = sum(map(len, lines)), None, lines, name
    function, args = pickle.loads(called)
    return function(*args)


def save_result(
    folder: Path, result: object, *, generation: int, rank: int, world_size: int
) -> None:
    """Save what the function returned; in a replica."""
    import cloudpickle

    path = folder / f"result-{generation}-{rank}-of-{world_size}.pickle"
    path.write_bytes(cloudpickle.dumps(result))


def remove_results(folder: Path) -> None:
    """Remove what replicas returned; before others are started in their place.

    A replica may have returned while the others were still to be rescaled, and without
    a job all generations have the same number.
    """
    for path in folder.iterdir():
        if _RESULT.fullmatch(path.name):
            path.unlink()


def read_results(folder: Path) -> list[Any]:
    """Return the results by rank of the last generation, the one that finished."""
    found: dict[int, dict[int, Path]] = {}
    sizes: dict[int, int] = {}
    for path in folder.iterdir():
        if match := _RESULT.fullmatch(path.name):
            generation, rank, world_size = map(int, match.groups())
            found.setdefault(generation, {})[rank] = path
            sizes[generation] = world_size
    last = max(found, default=0)
    paths = found.get(last, {})
    missing = [rank for rank in range(sizes.get(last, 1)) if rank not in paths]
    if missing:
        who = f"rank {', '.join(map(str, missing))}" if paths else "every replica"
        raise ElasticRunError(
            f"{who} ended before the function returned, with exit code 0, so there "
            "are no results. That is what sys.exit() does: return from the function "
            "instead."
        )
    return [pickle.loads(paths[rank].read_bytes()) for rank in sorted(paths)]
