"""Where a sweep restarts."""

from __future__ import annotations

from elasticrun.check.runs.scenarios import RestartPlace, places_to_try, spread


def in_loop(
    epoch: int, loop: int, num: int, *, outside: bool = False
) -> list[RestartPlace]:
    return [RestartPlace(epoch, loop, k + 1, not outside) for k in range(num)]


def end(epoch: int) -> list[RestartPlace]:
    return [RestartPlace(epoch, -1, 0)]


def texts(*parts: list[RestartPlace]) -> list[str]:
    return list(map(str, places_to_try([place for part in parts for place in part])))


def test_a_sweep_restarts_at_each_edge_of_loops_and_at_ends_of_epochs() -> None:
    epochs = [in_loop(e, 0, 4) + in_loop(e, 1, 4) + end(e) for e in range(3)]
    assert texts(*epochs, in_loop(3, 0, 2, outside=True)) == [
        "0:0:1", "0:1:3", "0:end", "2:1:4", "2:end", "after3:0:1",
    ]  # fmt: skip
    one_loop = [in_loop(e, 0, 4) + end(e) for e in range(3)]
    assert texts(*one_loop) == ["0:0:1", "0:0:4", "0:end", "2:0:3", "2:end"]


def test_a_sweep_restarts_only_where_a_run_came_to() -> None:
    left_at_once = [in_loop(0, 0, 4), end(0), in_loop(1, 0, 1), end(1), end(2)]
    assert texts(*left_at_once) == ["0:0:1", "0:0:4", "0:end", "1:0:1", "2:end"]
    assert texts(end(0), end(1), end(2)) == ["0:end", "2:end"]
    assert texts() == []


def test_boundaries_are_spread_over_the_whole_training() -> None:
    places = in_loop(0, 0, 8)
    assert [place.batch for place in spread(places, 3)] == [3, 5, 7]
    assert spread(places[:2], 3) == places[:2]
