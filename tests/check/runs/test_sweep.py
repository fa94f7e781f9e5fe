"""Where a sweep restarts."""

from __future__ import annotations

from elasticrun.check.runs.routes import RestartPlace
from elasticrun.check.runs.sweep import middle_of, places_to_try

LOOPS = [RestartPlace(epoch, loop, 4) for epoch in range(3) for loop in range(2)]


def test_a_sweep_restarts_at_the_edges_of_loops() -> None:
    places = places_to_try([*LOOPS, RestartPlace(3, 0, 2, False)], [0, 1, 2])
    texts = list(map(str, places))
    assert {"0:0:1", "0:0:3", "0:0:4", "0:1:1", "2:1:4", "0:end", "2:end"} <= set(texts)
    assert {"after3:0:1", "after3:0:2"} <= set(texts)
    assert len(set(texts)) == len(texts)
    assert texts == list(
        map(str, places_to_try([*LOOPS, RestartPlace(3, 0, 2, False)], [0, 1, 2]))
    )


def test_the_middle_of_a_training() -> None:
    assert middle_of([RestartPlace(0, 0, 0), *LOOPS], 0.0) == RestartPlace(0, 0, 2)
    assert middle_of(LOOPS, 0.5) == RestartPlace(1, 1, 2)
    assert middle_of(LOOPS, 1.0) == RestartPlace(2, 1, 2)
