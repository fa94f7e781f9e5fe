"""What runs without a restart show: their samples, and what differs by itself."""

from __future__ import annotations

import re
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
    others = again.compared
    for key, moment in base.compared.items():
        random = others[key].random if key in others else moment.random
        mask.unseeded |= {n for n, v in moment.random.items() if random.get(n) != v}
        other = others[key].variables if key in others else {}
        mask.noise |= {n for n, v in moment.variables.items() if other.get(n) != v}
    one, other = base.moments[-1].files, again.moments[-1].files
    for path in one.keys() & other.keys():
        if one[path] != other[path] and not mask.hides(path):
            mask.volatile_files.add(path)
    only = one.keys() ^ other.keys()
    for path in only:
        if sum(_shape(each) == _shape(path) for each in only) > 1:
            mask.unnamed_files.add(path)


def _shape(path: str) -> str:
    """Return a path without what looks like a time, a process or a random name."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", path)
