"""What runs without a restart show: their samples, and what differs by itself."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any

from elasticrun.check.comparing import Mask
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.job.trace import read_trace, samples_of_loop


def samples_of(run: CheckedRun) -> dict[tuple[int, str, int], list[int]]:
    """Return the samples of each global batch by (epoch, loop, batch).

    A loop is told by its number; one in the body of another also by the batches around
    it, each with how many loops had begun there before.
    """
    loops: dict[tuple[int, int, tuple[int, ...]], list[dict[str, Any]]] = {}
    for line in read_trace(run.trace):
        place = (line["epoch"], line["loop"], tuple(line.pop("inside", ())))
        loops.setdefault(place, []).append(line)
    return {
        (epoch, ".".join(map(str, (loop, *inside))), batch): samples
        for (epoch, loop, inside), lines in sorted(loops.items())
        for batch, samples in samples_of_loop(lines, epoch=epoch, loop=loop).items()
    }


def note_what_differs(mask: Mask, base: CheckedRun, again: CheckedRun) -> None:
    """Mask what differs between two runs without a restart."""
    for key, moment in base.compared.items():
        other = again.compared.get(key, moment)
        mask.unseeded |= _differing(moment.random, other.random)
        mask.noise |= _differing(moment.variables, other.variables)
        paths = moment.files.keys() & other.files.keys()
        differing = _differing(moment.files, other.files)
        mask.volatile_files |= {p for p in differing & paths if not mask.hides(p)}
        only = moment.files.keys() ^ other.files.keys()
        shapes = collections.Counter(map(_shape, only))
        mask.unnamed_files |= {path for path in only if shapes[_shape(path)] > 1}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name, value in one.items() if other.get(name) != value}


def _shape(path: str) -> str:
    """Return a path without what looks like a time, a process or a random name."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", path)
