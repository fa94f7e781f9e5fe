"""The job of a checked replica: it ends loops early, notes, and stops where told."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    JobStopped,
    Variables,
    remaining_epochs_until,
    remaining_steps_until,
    save_all_states,
)
from elasticrun.check.checked_run import CheckedRun, replays_of, snapshots_of
from elasticrun.check.replica.checked_job import CheckedJob
from elasticrun.check.replica.observing import import_from_copy
from elasticrun.check.scenarios import (
    Limits,
    Plan,
    RestartPlace,
    Scenario,
)
from elasticrun.job.trace import read_trace
from elasticrun.testing import Settings, use_job


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "work").mkdir()
    return Plan(
        directory=str(tmp_path / "work"),
        guarded=(),
        writable=(),
        records=str(tmp_path / "records"),
        checkpoints=str(tmp_path / "checkpoints"),
        generation=0,
        limits=Limits(max_epochs=2, max_batches=3),
    )


def train(num_epochs: int) -> list[list[list[int]]]:
    """Return the samples of each batch of each epoch; a counter is kept wrongly."""
    loader = AdaptiveDataLoader(TensorDataset(torch.arange(21)), 4, shuffle=True)
    counts = Variables(epochs=0)
    epochs = []
    for _ in remaining_epochs_until(num_epochs):
        counts.epochs += 1
        epochs.append([batch.tolist() for (batch,) in loader])
    return epochs


def boundaries_of(plan: Plan) -> list[str]:
    run = CheckedRun(Scenario((1,)), Path(plan.records).parent)
    return list(map(str, run.boundaries))


def test_epochs_that_were_cut_do_not_come_back(plan: Plan) -> None:
    with use_job(CheckedJob(plan)):
        assert list(remaining_epochs_until(5)) == [0, 1]
        assert list(remaining_epochs_until(5)) == []
        assert list(remaining_epochs_until(8)) == [2, 3]


def test_a_checked_program_keeps_the_trust_that_it_gives(plan: Plan) -> None:
    settings = Settings.read(trust_pickle=["counts"], save_interval=0)
    with use_job(CheckedJob(plan, settings=settings)):
        Variables(name="counts", last=RestartPlace(0, 0, 1))
        save_all_states()
    with use_job(CheckedJob(replace(plan, generation=1), settings=settings)) as job:
        assert Variables(name="counts", last=None).last == RestartPlace(0, 0, 1)
        assert job.settings.save_interval == math.inf


def test_a_cut_loop_delivers_the_batches_of_the_whole_one(plan: Plan) -> None:
    with use_job(CheckedJob(plan)):
        cut = train(9)
    whole_plan = replace(plan, limits=Limits(0, 0), checkpoints=plan.records + "-whole")
    with use_job(CheckedJob(whole_plan)):
        whole = train(2)
    assert [len(batch) for batch in cut[0]] == [4, 4, 1]
    assert [epoch[:2] for epoch in cut] == [epoch[:2] for epoch in whole]


def test_loops_that_count_steps_are_cut(plan: Plan) -> None:
    with use_job(CheckedJob(plan)):
        loader = AdaptiveDataLoader(TensorDataset(torch.arange(21)), 4)
        assert len(list(loader.batches(100_000))) == 3
        assert len(list(loader.batches())) == 3
        assert len(list(loader.batches(2))) == 2
        assert loader.finished_batches == 8
        assert list(remaining_steps_until(1000)) == [0, 1, 2]
        assert list(remaining_steps_until(2000)) == [3, 4, 5]
        assert list(remaining_steps_until(2)) == []


def test_batches_are_counted_over_a_restart(plan: Plan) -> None:
    def step() -> None:
        loader = AdaptiveDataLoader(TensorDataset(torch.arange(9)), {0: 2, 2: 3})
        list(loader.batches(2))
        list(remaining_steps_until(50))
        list(remaining_steps_until(90))
        list(loader.batches(3))

    places = [RestartPlace(0, loop, 2, False) for loop in (2, 3)]
    for generation, until in enumerate([*places, None]):
        own = replace(plan, generation=generation, until=until)
        with contextlib.suppress(JobStopped), use_job(CheckedJob(own)):
            step()
    snapshots = snapshots_of(read_trace(plan.records))
    ends = [m.num_batches for m in snapshots if m.key.kind == "leave"]
    assert ends == [2, 3, 3, 3]
    assert boundaries_of(plan)[-1] == "after0:3:3"
    kinds = [m.key.kind for m in snapshots if m.key.loop >= 0]
    assert kinds == [
        "enter", "leave", "enter", "leave", "enter",
        "skip", "skip", "continue", "leave", "enter",
        "skip", "skip", "skip", "continue", "leave",
    ]  # fmt: skip


def test_only_boundaries_that_a_program_comes_to_are_noted(plan: Plan) -> None:
    with use_job(CheckedJob(plan)):
        loader = AdaptiveDataLoader(TensorDataset(torch.arange(9)), 3)
        for epoch in remaining_epochs_until(2):
            if epoch:
                break  # No boundary is at the end of this epoch.
            for _ in loader:
                if loader.batch_index:
                    break
            for _ in loader:
                break
    assert boundaries_of(plan) == ["0:0:1", "0:end"]


def test_a_stop_that_is_put_off_comes_where_the_gradients_are_used(plan: Plan) -> None:
    def step() -> None:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = AdaptiveDataParallel(net, optimizer)
        loader = AdaptiveDataLoader(TensorDataset(torch.ones(12, 1)), 3)
        for number, (x,) in loader.enumerate():
            model(x).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    plan = replace(plan, limits=Limits(0, 0))
    first = RestartPlace(0, 0, 1, False)
    with pytest.raises(JobStopped), use_job(CheckedJob(replace(plan, until=first))):
        step()
    with use_job(CheckedJob(replace(plan, generation=1))):
        step()
    assert boundaries_of(plan) == ["after0:0:2", "after0:0:4"]


def test_what_a_replay_changes_is_noted(plan: Plan) -> None:
    with (
        pytest.raises(JobStopped) as stopped,
        use_job(CheckedJob(replace(plan, until=RestartPlace(1, 0, 2)))),
    ):
        train(9)
    assert stopped.value.code == 75
    with use_job(CheckedJob(replace(plan, generation=1))):
        train(9)
    snapshots = snapshots_of(read_trace(plan.records))
    epoch = ["{0}:0:1", "{0}:0:2", "{0}:0:3", "{0}:end"]
    assert boundaries_of(plan) == [each.format(e) for e in (0, 1) for each in epoch]
    (replay,) = replays_of(snapshots)
    assert replay.stopped.fields["variables.epochs"] == 2
    assert replay.resumed.fields["variables.epochs"] == 2  # As the first run had it.
    assert [zone for zone, _ in replay.steps] == ["P", "P", "A"]


def test_files_that_a_program_changes_are_noted(plan: Plan) -> None:
    log = Path(plan.directory) / "log.txt"
    log.write_text("before\n")
    with use_job(CheckedJob(plan)):
        for _ in remaining_epochs_until(1):
            log.write_text("before\nand after\n")
    snapshots = snapshots_of(read_trace(plan.records))
    files = {snapshot.key.kind: snapshot.files for snapshot in snapshots}
    assert files["begin"] == {}
    assert files["end"]["log.txt"]["lines"] == 2


def test_modules_come_from_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "lib").mkdir(parents=True)
    home, work = "/home/someone", str(tmp_path / "work")
    path = [f"{home}/lib", home, f"{home}/.venv/site-packages", "/usr/lib"]
    monkeypatch.setattr(sys, "path", path)
    import_from_copy(home, work)
    assert sys.path == [f"{work}/lib", work, f"{home}/.venv/site-packages", "/usr/lib"]
