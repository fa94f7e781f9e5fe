"""Which boundaries of a run a check restarts at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from elasticrun.check.runs.routes import RestartPlace

_EDGES = (0, -2, -1)  # The first boundary of a loop, the last but one and the last.
_MOST_LOOPS = 2  # Of the first epoch, and outside of epochs.


def places_to_try(boundaries: Sequence[RestartPlace]) -> list[RestartPlace]:
    """Return the boundaries where mistakes show, in their order.

    The first batch of a loop, the last but one and the last, each of another loop if
    there are as many: of two in the first epoch, of one in the last, of some outside of
    epochs. And the ends of the first and the last epoch.
    """
    loops: dict[RestartPlace, list[RestartPlace]] = {}
    for place in boundaries:
        loops.setdefault(place.at(0), []).append(place)
    ends = [loop for loop in loops if loop.is_end]
    inside = [loop for loop in loops if loop.in_epoch and not loop.is_end]
    first = [loop for loop in inside if loop.epoch == inside[0].epoch]
    outside = [loop for loop in loops if not loop.in_epoch]
    some = first[:_MOST_LOOPS] + inside[-1:] + outside[:_MOST_LOOPS]
    chosen = list(dict.fromkeys(some))
    tried = {*ends[:1], *ends[-1:]}
    num_edges = max(len(chosen), len(_EDGES)) if chosen else 0
    for number, loop in enumerate(itertools.islice(itertools.cycle(chosen), num_edges)):
        edge = _EDGES[number % len(_EDGES)]
        tried.add(loops[loop][max(edge, -len(loops[loop]))])
    return [place for place in boundaries if place in tried]


def spread(boundaries: Sequence[RestartPlace], count: int) -> list[RestartPlace]:
    """Return so many boundaries, or all, evenly spread over the whole training."""
    return [
        boundaries[(number + 1) * len(boundaries) // (count + 1)]
        for number in range(min(count, len(boundaries)))
    ]
