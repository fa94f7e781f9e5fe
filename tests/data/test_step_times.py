"""Which steps of a loader's loops are timed, and what is kept of that."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    init,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.adaptive.step_time import TimedSteps
from elasticrun.job.job import Job
from tests.support.data import Numbers
from tests.support.generations import run_once


def make_trainer() -> torch.optim.Optimizer:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    AdaptiveDataParallel(net, optimizer)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return optimizer


def steps_of(loader: AdaptiveDataLoader) -> list[TimedSteps]:
    assert loader._state.times is not None
    return loader._state.times.steps


def kinds(loader: AdaptiveDataLoader) -> list[tuple[float, ...]]:
    return [step[:4] for step in steps_of(loader)]


@pytest.mark.usefixtures("job")
def test_only_what_is_trained_with_is_timed() -> None:
    optimizer = make_trainer()
    train, valid, inner = (AdaptiveDataLoader(Numbers(100), 4) for _ in range(3))
    for _ in train:
        optimizer.step()
        for _ in inner:
            optimizer.step()
    for _ in valid:
        pass
    assert kinds(train) == [(1, 1, 4, 1)]
    assert kinds(valid) == kinds(inner) == []


def test_the_first_batch_and_measured_and_shorter_ones_are_not_timed(job: Job) -> None:
    optimizer = make_trainer()
    loader = AdaptiveDataLoader(Numbers(50), 4, max_local_batch_size=2)
    times: Any = loader._state.times
    for epoch in range(3):
        for _ in loader:
            optimizer.step()
        assert len(times._times[1, 1, 2.0, 2]) == 11 * (epoch + 1)
    assert list(times._times) == [(1, 1, 2.0, 2)]
    assert times.batch_size == 4
    job.cuts_for_noise = lambda: True
    longer = AdaptiveDataLoader(Numbers(140), 4)
    for _ in longer:
        optimizer.step()
    times = longer._state.times
    assert list(times._times) == [(1, 1, 4.0, 1)]
    assert len(times._times[1, 1, 4.0, 1]) == 31  # 0 and 32 are cut, and no like 1, 33.


@pytest.mark.usefixtures("job")
def test_batches_without_planned_sizes_are_not_timed() -> None:
    optimizer = make_trainer()
    lists = AdaptiveDataLoader(Numbers(40), batch_sampler=[[k] for k in range(40)])
    member = AdaptiveDataLoader(Numbers(40), 1)
    combined = CombinedLoader([member])
    for loader in (lists, combined):
        for _ in loader:
            optimizer.step()
        assert loader._state.times is None
    assert kinds(member) == []


def test_times_are_kept_and_newer_ones_replace_them(tmp_path: Path) -> None:
    def script(until: int) -> list[TimedSteps]:
        optimizer = make_trainer()
        loader = AdaptiveDataLoader(Numbers(400), {0: 4, 200: 8}, name="train")
        known = steps_of(loader)
        for _ in remaining_epochs_until(2):
            for _ in loader:
                optimizer.step()
                if loader.batch_index == until:
                    request_stop()
        return known + steps_of(loader)

    assert run_once(partial(script, 40), tmp_path) is None
    assert run_once(partial(script, 70), tmp_path) is None
    path = max(tmp_path.glob("checkpoint-*/manifest.json")).parent
    values = json.loads((path / "loader.train").read_text())["step_times"]
    assert [step[2] for step in values["steps"]] == [4, 8]
    assert values["batch_size"] == 8
    known = run_once(partial(script, -1), tmp_path)
    assert [step.size for step in known] == [4, 8, 4, 8]
    assert known[2].seconds == known[0].seconds  # Not timed again.
    assert known[3].seconds != known[1].seconds


def test_a_state_of_ones_own_has_no_times(tmp_path: Path) -> None:
    def script() -> Any:
        init(tmp_path)
        optimizer = make_trainer()
        loader = AdaptiveDataLoader(Numbers(80), 4)
        for _ in loader:
            optimizer.step()
        return loader.state_dict()

    assert "step_times" not in str(script())


@pytest.mark.usefixtures("job")
def test_the_newest_come_last() -> None:
    optimizer = make_trainer()
    loader = AdaptiveDataLoader(Numbers(100), 4)
    times: Any = loader._state.times
    known = [[1, 1, size, 1, 0.1] for size in (4.0, 8.0)]
    times.decode({"batch_size": 8, "steps": known})
    assert [step.size for step in steps_of(loader)] == [4, 8]
    for _ in loader:
        optimizer.step()
    assert [step.size for step in steps_of(loader)] == [8, 4]
