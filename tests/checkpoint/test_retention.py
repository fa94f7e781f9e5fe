"""Which checkpoints stay: the newest, every n-th, the best; and when one is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointWarning,
    Variables,
    current_job,
    remaining_epochs_until,
    request_checkpoint,
    save_all_states,
)
from elasticrun.checkpoint.listing import list_numbers, read_checkpoint
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.retention import RetentionPolicy
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.saving.schedule import (
    FIRST_INTERVAL,
    SECONDS_BETWEEN_FAILURES,
    AutoInterval,
)
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.generations import JOB, Crash, run_once


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name[11:]) for path in directory.glob("checkpoint-*"))


# The rule


@given(
    found=st.dictionaries(
        st.integers(1, 30), st.tuples(st.booleans(), st.none() | st.integers(0, 3))
    ),
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    best=st.sampled_from([None, "max", "min"]),
)
def test_the_rule_keeps_what_it_says_and_nothing_else(
    found: dict[int, tuple[bool, int | None]],
    last: int,
    every: int | None,
    best: str | None,
) -> None:
    stay = RetentionPolicy(
        last, every, None if best is None else ("loss", best)
    ).choose(
        sorted(found, reverse=True),
        is_good=lambda number: found[number][0],
        value_of=lambda number: found[number][1],
    )
    good = sorted((n for n in found if found[n][0]), reverse=True)
    oldest = good[last - 1] if len(good) >= last else 0
    expected = {n for n in found if n >= oldest}
    expected |= {n for n in found if every is not None and n % every == 0}
    values = {n: value for n in good if (value := found[n][1]) is not None}
    if best is not None and values:
        extreme = max(values.values()) if best == "max" else min(values.values())
        expected.add(min(n for n, value in values.items() if value == extreme))
    assert stay == expected
    assert set(good[:1]) <= stay  # Never the last good one.


def train(accuracies: Sequence[Any]) -> Callable[[], None]:
    """Return a program that has one accuracy after another, and saves at each."""

    def script() -> None:
        best = Variables(accuracy=None)
        for accuracy in accuracies:
            best.accuracy = accuracy
            save_all_states()

    return script


def test_every_third_stays_for_ever(tmp_path: Path) -> None:
    run_once(train([0.0] * 10), tmp_path, keep=2, keep_every=3)
    assert numbers(tmp_path) == [3, 6, 9, 10]


@pytest.mark.parametrize(("which", "best"), [("max", 3), ("min", 2)])
def test_the_best_stays_over_restarts(tmp_path: Path, which: str, best: int) -> None:
    keeping: dict[str, Any] = {"keep": 1, "keep_best": ("accuracy", which)}
    run_once(train([0.5, 0.25, 0.75, 0.75]), tmp_path, **keeping)
    assert numbers(tmp_path) == [best, 4]
    run_once(train([0.5, 0.6]), tmp_path, **keeping)
    assert numbers(tmp_path) == [best, 6]


@pytest.mark.parametrize("recorded", ["variables.accuracy", "accuracy"])
def test_the_best_stays_under_either_spelling(tmp_path: Path, recorded: str) -> None:
    """What is recorded under the short name alone is of an earlier elasticrun."""

    def find(registry: Registry, name: str) -> tuple[str, float | None]:
        return recorded, find_value(registry, name)[1]

    find_value = Registry.find_value
    with mock.patch.object(Registry, "find_value", find):
        run_once(train([0.5, 0.75, 0.5]), tmp_path, keep=1, keep_best="accuracy:max")
    assert numbers(tmp_path) == [2, 3]
    for name in ("variables.accuracy", "accuracy"):
        run_once(train([0.25, 0.5]), tmp_path, keep=1, keep_best=f"{name}:max")
        assert numbers(tmp_path)[0] == 2


def test_a_damaged_one_is_not_the_best(tmp_path: Path) -> None:
    keeping: dict[str, Any] = {"keep": 1, "keep_best": "accuracy:max"}
    run_once(train([0.5, 0.75, 0.6, 0.1]), tmp_path, keep=9, keep_best="accuracy:max")
    (tmp_path / "checkpoint-00000002" / "variables").write_bytes(b"")
    run_once(train([0.2]), tmp_path, **keeping)
    assert numbers(tmp_path) == [3, 5]


def test_values_may_be_tensors_and_unknown_ones_do_not_count(tmp_path: Path) -> None:
    values: list[Any] = [None, torch.tensor(0.5), math.inf, math.nan, "high", 0.25]
    run_once(train(values), tmp_path, keep=1, keep_best="accuracy:max")
    assert numbers(tmp_path) == [2, 6]


def test_a_value_that_is_nowhere_is_warned_of_once(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning) as caught:
        run_once(train([0.5, 0.6]), tmp_path, keep_best=("loss", "min"))
    assert [str(warning.message) for warning in caught] == [
        (
            "keep_best=('loss', 'min'): no Variables have 'loss', so no checkpoint can "
            "be the best. Make a Variables with that value before the first save."
        )
    ]


def test_a_name_that_means_two_values_is_warned_of(tmp_path: Path) -> None:
    def script() -> None:
        for name, value in (("train", 0.1), ("valid", 0.2)):
            Variables(name=name, accuracy=value)
        save_all_states()

    with pytest.warns(
        CheckpointWarning,
        match=r"'accuracy' is train\.accuracy and valid\.accuracy; name one of them",
    ):
        run_once(script, tmp_path, keep_best="accuracy:max")
    run_once(script, tmp_path, keep_best="valid.accuracy:max")
    newest = CheckpointStore(tmp_path, job=JOB).find_newest()
    assert newest is not None
    assert newest.manifest.values == {"valid.accuracy": 0.2}


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
