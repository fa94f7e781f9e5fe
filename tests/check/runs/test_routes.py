"""A route says with which options it is taken again."""

from __future__ import annotations

from elasticrun.check.runs.places import RestartPlace
from elasticrun.check.runs.routes import Route, straight


def test_a_route_says_how_it_is_taken() -> None:
    route = Route((1, 2, 1), (RestartPlace(0, 1, 2), RestartPlace(1, -1, 0)))
    assert route.options() == [
        "--at", "0:1:2", "--at", "1:end", "--replicas", "1,2,1",
    ]  # fmt: skip
    assert Route((2, 2), (RestartPlace(0, 0, 1),), is_killed=True).options() == [
        "--at", "0:0:1", "--replicas", "2", "--kill",
    ]  # fmt: skip
    assert straight(3).options() == ["--replicas", "3"]
