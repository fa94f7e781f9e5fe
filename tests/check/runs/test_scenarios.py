"""Places and scenarios are written as the options with which they are taken again."""

from __future__ import annotations

import pytest

from elasticrun.check.runs.scenarios import (
    RestartPlace,
    Scenario,
    parse_restart_place,
    scenario_without_restart,
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
    assert scenario_without_restart(3).options() == ["--replicas", "3"]
