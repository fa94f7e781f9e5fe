"""What a job notes in its events, whoever has started it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.checkpoint.events import read_events
from elasticrun.job import event_writer
from tests.support.generations import Crash, run_once
from tests.support.stage import wait_until


def program(at: tuple[int, int] = (-1, -1), action: str = "") -> None:
    """Train two epochs of 12 samples, and do something in one batch."""
    best = Variables(accuracy=0.0, name="best")
    best.note = "of no number"
    train = AdaptiveDataLoader(range(12), 4, name="train")
    test = AdaptiveDataLoader(range(6), 6, name="test")
    for epoch in remaining_epochs_until(2):
        for _ in train:
            if (epoch, train.batch_index) == at:
                if action == "stop":
                    request_stop()
                else:
                    save_all_states()
                    raise Crash
        for _ in test:
            best.accuracy += 0.25


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == kind]


def test_generations_and_checkpoints_are_noted(tmp_path: Path) -> None:
    run_once(lambda: program((1, 1), "raise"), tmp_path, async_save=False)
    run_once(lambda: program((1, 2), "stop"), tmp_path, async_save=False)
    run_once(program, tmp_path)
    begun = events_of(tmp_path, "begin")
    assert [each["generation"] for each in begun] == [0, 1, 2]
    assert [each["checkpoint"] for each in begun] == [None, 1, 2]
    assert {each["world_size"] for each in begun} == {1}
    assert begun[1]["position"] == "epoch 1, loop 0, sample 4 of `train`"
    saved = events_of(tmp_path, "checkpoint")
    # Those that were done in each generation; the batch of the save comes again.
    assert [each["samples"] for each in saved] == [12 + 6 + 4, 8, 6]
    assert [each["values"] for each in saved] == [
        {"best.accuracy": value} for value in (0.25, 0.25, 0.5)
    ]
    assert all(0 < each["paused"] <= 60 and each["bytes"] > 100 for each in saved)
    left = events_of(tmp_path, "leave")
    assert [each["code"] for each in left] == [None, 75, None]
    assert left[-1]["position"] == "the end of epoch 1"


def has_positions(folder: Path, number: int) -> bool:
    return len(events_of(folder, "progress")) >= number


def test_positions_are_noted_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "_SHORTEST", 0.001)

    def train() -> None:
        for number, _ in enumerate(AdaptiveDataLoader(range(3), 1)):
            wait_until(partial(has_positions, tmp_path, number))

    run_once(train, tmp_path)
    assert [each["samples"] for each in events_of(tmp_path, "progress")][:2] == [1, 2]
