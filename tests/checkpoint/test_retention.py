"""Which checkpoints stay, and when one is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun import (
    AdaptiveDataLoader,
    current_job,
    remaining_epochs_until,
    request_checkpoint,
    save_all_states,
)
from elasticrun.checkpoint.draft import list_numbers, read_checkpoint
from elasticrun.checkpoint.retention import newest_to_keep
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.saving.schedule import (
    FIRST_INTERVAL,
    SECONDS_BETWEEN_FAILURES,
    AutoInterval,
)
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name[11:]) for path in directory.glob("checkpoint-*"))


# The rule


@given(st.dictionaries(st.integers(1, 30), st.booleans()), st.integers(1, 4))
def test_the_newest_good_ones_stay_and_nothing_older(
    found: dict[int, bool], keep: int
) -> None:
    numbers = sorted(found, reverse=True)
    stay = newest_to_keep(numbers, keep, is_good=lambda number: found[number])
    good = [number for number in numbers if found[number]]
    oldest = good[keep - 1] if len(good) >= keep else 0
    assert stay == {number for number in numbers if number >= oldest}


# When


def saved_at(directory: Path, script: Any = None, **settings: Any) -> list[Any]:
    """Return where each checkpoint of two epochs of five batches was written."""

    def train() -> None:
        loader = AdaptiveDataLoader(Numbers(20), 4, name="train")
        for epoch in remaining_epochs_until(2):
            for _ in loader:
                if script is not None:
                    script(epoch, loader.batch_index)

    run_once(train, directory, keep=99, **settings)
    found = []
    storage = storage_at(directory)
    for number in reversed(list_numbers(storage)):
        position = read_checkpoint(storage, number).manifest.position
        found.append((position["finished_epochs"], position["index"] // 4))
    return found


END = (2, 0)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, [END]),
        ("epoch", [(1, 0), END]),
        (1, [*((0, n) for n in range(1, 6)), *((1, n) for n in range(1, 6)), END]),
        (2, [(0, 2), (0, 4), (1, 1), (1, 3), (1, 5), END]),
        ("3", [(0, 3), (1, 1), (1, 4), END]),
        ("4,epoch", [(0, 4), (1, 0), (1, 4), END]),
    ],
)
def test_it_is_saved_after_batches_and_epochs(
    tmp_path: Path, every: Any, expected: list[Any]
) -> None:
    assert saved_at(tmp_path, save_every=every) == expected


def test_any_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    def ask(epoch: int, batch: int) -> None:
        if (epoch, batch) == (0, 0):
            request_checkpoint()

    assert saved_at(tmp_path, ask, save_every=3) == [
        *((0, 1), (0, 4), (1, 2), (1, 5), END),
    ]


@pytest.mark.slow
def test_batches_are_the_same_on_all_replicas(tmp_path: Path) -> None:
    variables = {
        "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
        "ELASTICRUN_SAVE_INTERVAL": "off",
        "ELASTICRUN_SAVE_EVERY": "2",
        "ELASTICRUN_KEEP": "99",
    }

    def train() -> None:
        # In the last batch of each epoch only one replica has a sample.
        loader = AdaptiveDataLoader(Numbers(9), 4, even_batches=False)
        for _ in remaining_epochs_until(2):
            for _ in loader:
                pass

    run_generation(train, 2, variables=variables)
    storage = storage_at(tmp_path)
    positions = [
        read_checkpoint(storage, number).manifest.position
        for number in list_numbers(storage)
    ]
    assert [(p["finished_epochs"], p["index"]) for p in reversed(positions)] == [
        *((0, 8), (1, 4), (1, 9), (2, 0)),
    ]


# The interval that finds itself


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_interval_comes_from_what_saves_cost() -> None:
    clock = Clock()
    interval = AutoInterval(clock=clock)
    assert interval.next_interval() == FIRST_INTERVAL
    clock.now += 10_000
    interval.note_cost(1.0)
    interval.note_cost(3.0)
    expected = math.sqrt(2 * 2.0 * SECONDS_BETWEEN_FAILURES)
    assert interval.next_interval() == pytest.approx(expected)
    assert expected == 240


@given(costs=st.lists(st.floats(0.001, 100), min_size=1, max_size=30))
def test_saves_never_take_more_than_a_hundredth(costs: list[float]) -> None:
    clock = Clock()
    interval = AutoInterval(clock=clock)
    spent, begun = 0.0, clock.now
    for cost in costs:
        clock.now += cost
        spent += cost
        interval.note_cost(cost)
        clock.now += interval.next_interval()
    assert spent <= 0.01 * (clock.now - begun) * (1 + 1e-9)


def test_the_job_learns_what_its_saves_cost(tmp_path: Path) -> None:
    def script() -> None:
        job = current_job()
        auto = job._schedule._by_time
        assert isinstance(auto, AutoInterval)
        for _ in AdaptiveDataLoader(Numbers(8), 4):
            save_all_states()
            assert len(auto._costs) > 0
            assert job._watcher._save_interval == pytest.approx(
                auto.next_interval(), rel=0.1
            )

    run_once(script, tmp_path, save_interval="auto")


def test_a_job_saves_by_an_interval_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticrun.saving.schedule.FIRST_INTERVAL", 0.01)

    def script() -> None:
        for _ in AdaptiveDataLoader(Numbers(1_000_000), 1):
            if list_numbers(storage_at(tmp_path)):
                raise Crash

    run_once(script, tmp_path, save_interval="auto")
    assert numbers(tmp_path) == [1]
