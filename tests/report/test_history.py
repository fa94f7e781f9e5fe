"""A job's history, from its events."""

from __future__ import annotations

import pytest

from elasticrun.report import command
from elasticrun.report.command import Timeline
from tests.report.made import BEGIN, events


def test_generations_have_their_causes_and_ends() -> None:
    found = Timeline(events()).generations
    assert [(each.number, each.world_size, each.cause) for each in found] == [
        (0, 2, "start"),
        (1, 4, "rescaling"),
        (2, 4, "crash"),
        (3, 1, "start"),
    ]
    assert [each.why for each in found] == [
        "the beginning",
        "from 2 to 4",
        "a crash",
        "started again",
    ]
    assert [each.ending for each in found] == [
        "a rescaling to 4 replicas",
        "crashed: rank 2 raised ValueError: </script><b>loss</b> @@data@@ is nan",
        "stopped with exit code 143",
        "finished after 12 s",
    ]


def test_samples_are_counted_from_the_beginning_and_what_was_lost_is_known() -> None:
    told = Timeline(events())
    assert [each.base for each in told.generations] == [0, 2000, 5000, 7200]
    # The crash told of 100 samples more than the replicas did before they ended.
    assert [each.repeated for each in told.generations] == [0, 0, 2100, 0]
    assert told.generations[2].repeated_seconds == 51 - 40
    page = told.describe()
    assert (page["done"], page["repeated"], page["num_checkpoints"]) == (8200, 2100, 4)
    assert page["training"] == 22 + 26 + 11 + 11
    assert page["saving"] == 2.0
    assert page["generations"][1]["points"][-1] == (BEGIN + 51, 7100)
    assert page["speeds"][0][:2] == [(BEGIN + 1, 100), (BEGIN + 11, 100)]
    assert [value for _, value in page["values"]["variables.accuracy"]] == [
        *(0.5, 0.75, 0.875, 1.0)
    ]


def test_a_killed_generation_has_ended_without_a_word() -> None:
    some = [event for event in events() if event["event"] in ("begin", "progress")]
    told = Timeline(some).generations
    assert [each.ending for each in told] == [*["it ended unexpectedly"] * 3, ""]
    # What the checkpoint had passed is not known: nothing counts as lost.
    assert [each.repeated for each in told] == [0, 0, 0, 0]
    assert Timeline([]).describe()["done"] == 0


def test_a_page_has_room_for_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MOST_POINTS", 8)
    page = Timeline(events()).describe()
    assert all(len(each["points"]) <= 3 for each in page["generations"])
    assert page["generations"][0]["points"][0] == (BEGIN + 1, 0)
    assert page["generations"][0]["points"][-1] == (BEGIN + 23, 2000)
