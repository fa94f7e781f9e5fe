"""Where a sweep restarts, and what a scenario tells people and replicas."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from elasticrun.check.checked_run import SnapshotKey
from elasticrun.check.scenarios import (
    Limits,
    Plan,
    RestartPlace,
    Scenario,
    decode_plan,
    parse_restart_place,
    places_to_try,
    spread,
)


@pytest.mark.parametrize("text", ["0:1:3", "2:end", "after3:0:2"])
def test_a_place_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_restart_place(text)) == text


@pytest.mark.parametrize(
    "text", ["", "1", "0:0", "0:0:0", "after1:end", "a:b:c", "-1:0:1"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"--at"):
        parse_restart_place(text)


def test_a_scenario_says_how_it_is_run() -> None:
    scenario = Scenario((1, 2, 1), (RestartPlace(0, 1, 2), RestartPlace(1, -1, 0)))
    assert scenario.options() == [
        "--at", "0:1:2", "--at", "1:end", "--replicas", "1,2,1",
    ]  # fmt: skip
    assert Scenario((2, 2), (RestartPlace(0, 0, 1),), is_killed=True).options() == [
        "--at", "0:0:1", "--replicas", "2", "--kill",
    ]  # fmt: skip
    assert Scenario((3,)).options() == ["--replicas", "3"]


def test_a_plan_survives_its_way_to_a_replica() -> None:
    plan = Plan(
        "work", ("home",), ("scratch",), "records", "checkpoints", 1,
        until=RestartPlace(0, 1, 2),
    )  # fmt: skip
    assert decode_plan(json.loads(json.dumps(asdict(plan)))) == plan


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(61, 29), (64, 32), (32, 32), (30, 30), (33, 25), (5, 5)],
)
def test_a_cut_loop_keeps_the_size_of_its_last_batch(
    num_samples: int, expected: int
) -> None:
    assert Limits(max_batches=4).samples(num_samples, 8) == expected
    assert Limits(max_batches=0).samples(num_samples, 8) == num_samples


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


def test_snapshots_have_words() -> None:
    assert SnapshotKey("leave", 2, 1).describe() == "the end of loop 1 of epoch 2"
    assert SnapshotKey("exit").describe() == "the end of the program"
