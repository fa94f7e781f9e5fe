"""Which boundaries a sweep restarts at.

Loops are given by the ends of their last batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from elasticrun.check.runs.routes import RestartPlace

_NUM_RANDOM = 4
_MOST_LOOPS = 4  # Of one epoch.


def places_to_try(
    loops: Sequence[RestartPlace], epochs: Sequence[int]
) -> list[RestartPlace]:
    """Return the boundaries where mistakes show, and a few others.

    The first batch, the last but one and the last of each loop, in the first and the
    last epoch; the ends of epochs; loops outside of epochs; and some at random, always
    the same ones.
    """
    places: list[RestartPlace] = []
    for epoch in dict.fromkeys([*epochs[:1], *epochs[-1:]]):
        own = [each for each in loops if each.in_epoch and each.epoch == epoch]
        for loop in _some(own):
            places += _edges(loop)
    places += [
        RestartPlace(epoch, -1, 0)
        for epoch in dict.fromkeys([*epochs[:1], *epochs[-2:]])
    ]
    for loop in [each for each in loops if not each.in_epoch][:_MOST_LOOPS]:
        places += _edges(loop)
    return list(dict.fromkeys([*places, *_at_random(loops)]))


def middle_of(loops: Sequence[RestartPlace], part: float) -> RestartPlace:
    """Return a boundary about so far into the whole training."""
    there = [each for each in loops if each.batch]
    loop = there[min(int(part * len(there)), len(there) - 1)]
    return loop.at((loop.batch + 1) // 2)


def _some(loops: list[RestartPlace]) -> list[RestartPlace]:
    if len(loops) <= _MOST_LOOPS:
        return loops
    return [*loops[: _MOST_LOOPS - 1], loops[-1]]


def _edges(loop: RestartPlace) -> list[RestartPlace]:
    last = loop.batch
    return [loop.at(batch) for batch in dict.fromkeys([1, last - 1, last]) if batch > 0]


def _at_random(loops: Sequence[RestartPlace]) -> list[RestartPlace]:
    every = [each.at(k + 1) for each in loops for k in range(each.batch)]
    return random.Random(0).sample(every, min(_NUM_RANDOM, len(every)))
