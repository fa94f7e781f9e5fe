"""Where a sweep restarts."""

from __future__ import annotations

from elasticrun.check.runs.places import LoopPlace, RestartPlace
from elasticrun.check.runs.sweep import first_place_in, places_to_try

LOOPS = [LoopPlace(epoch, loop, True, 4) for epoch in range(3) for loop in range(2)]


def test_a_sweep_restarts_at_the_edges_of_loops() -> None:
    places = places_to_try([*LOOPS, LoopPlace(3, 0, False, 2)], [0, 1, 2])
    texts = list(map(str, places))
    assert {"0:0:1", "0:0:3", "0:0:4", "0:1:1", "2:1:4", "0:end", "2:end"} <= set(texts)
    assert {"after3:0:1", "after3:0:2"} <= set(texts)
    assert len(set(texts)) == len(texts)
    assert texts == list(
        map(str, places_to_try([*LOOPS, LoopPlace(3, 0, False, 2)], [0, 1, 2]))
    )


def test_the_first_batch_of_a_loop() -> None:
    assert first_place_in(LOOPS, 1, 1) == RestartPlace(1, 1, 1)
    assert first_place_in(reversed(LOOPS), None, 0) == RestartPlace(2, 0, 1)
    assert first_place_in(LOOPS, 5, 0) is None
