"""Fits of Lightning's go on where they were, with the results of those left alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from elasticrun import AdaptiveDataLoader, ElasticRunError, rank, request_stop
from elasticrun.integrations.lightning import Elastic
from elasticrun.testing import run_generation, start_generation
from tests.integrations.fitting import NUM_BATCHES, NUM_EPOCHS, Fit, Net
from tests.support.foreign import delivered, deliveries
from tests.support.generations import Crash, run_once
from tests.support.programs import StopOnce

# Lightning warns of small loaders, directories that exist, and deprecations of torch's.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 600.0
EVERY_BATCH = range(1, NUM_BATCHES * NUM_EPOCHS + 1)


def run(directory: Path, fit: Fit, **options: Any) -> Any:
    trace = str(directory / "trace")
    return run_once(fit.run, directory, trace_dir=trace, **options)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("calm")
    ended = run(directory, Fit(str(directory)))
    return ended, delivered(directory / "trace")


@pytest.mark.parametrize("accumulated", [1, 3])
def test_one_replica_does_what_lightning_does(tmp_path: Path, accumulated: int) -> None:
    fit = Fit(str(tmp_path), accumulated=accumulated)
    ours = run(tmp_path, fit)
    bare = replace(fit, directory=str(tmp_path / "bare"))
    assert bare.run_bare(delivered(tmp_path / "trace")) == ours


def test_stops_do_not_show(tmp_path: Path, calm: Any) -> None:
    def stop_soon(trainer: Trainer) -> None:
        request_stop()

    fit = Fit(str(tmp_path))
    for _ in EVERY_BATCH:
        if run(tmp_path, replace(fit, on_batch=stop_soon)) is not None:
            break
    assert (run(tmp_path, fit)["parameters"]) == calm[0]["parameters"]
    assert delivered(tmp_path / "trace") == calm[1]
    assert len({generation for generation, _ in deliveries(tmp_path / "trace")}) > 6


@pytest.fixture(scope="module")
def calm_accumulating(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("accumulating")
    return run(directory, Fit(str(directory), accumulated=3))


@pytest.mark.parametrize(
    ("died_in", "accumulated"),
    [*((batch, 1) for batch in EVERY_BATCH), (2, 3), (4, 3), (7, 3)],
)
def test_kills_do_not_show(
    tmp_path: Path, calm: Any, calm_accumulating: Any, died_in: int, accumulated: int
) -> None:
    def die(trainer: Trainer) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == died_in:
            raise Crash

    fit = Fit(str(tmp_path), accumulated=accumulated)
    assert run(tmp_path, replace(fit, on_batch=die), save_interval=0) is None
    assert run(tmp_path, fit) == (calm[0] if accumulated == 1 else calm_accumulating)
    assert delivered(tmp_path / "trace") == calm[1]


def test_a_finished_or_early_stopped_fit_is_not_repeated(tmp_path: Path) -> None:
    fit = Fit(str(tmp_path), patience=0, num_epochs=40)
    ended = run(tmp_path, fit)
    assert ended["steps"] < 40 * NUM_BATCHES
    assert run(tmp_path, fit)["log"] == ended["log"]


def die_in_last_batch(trainer: Trainer) -> None:
    if trainer.fit_loop.total_batch_idx + 1 == EVERY_BATCH[-1] and rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_stops_and_a_kill_at_1_to_3_replicas_do_not_show(
    tmp_path: Path, calm: Any
) -> None:
    fit = Fit(str(tmp_path / "job"))
    variables = {"ELASTICRUN_TRACE": str(tmp_path / "trace")}
    stopping = replace(fit, on_batch=StopOnce())
    left = run_generation(stopping, 2, timeout=TIMEOUT, variables=variables)
    assert left == [None] * 2
    dying = replace(fit, on_batch=die_in_last_batch, save_interval=0)
    with start_generation(dying, 3, variables=variables) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[2].exit_code == -signal.SIGKILL
    (ended,) = run_generation(fit, 1, timeout=TIMEOUT, variables=variables)
    for name, expected in calm[0].items():
        assert ended[name] == pytest.approx(expected, abs=1e-5), name
    assert delivered(variables["ELASTICRUN_TRACE"]) == calm[1]


def test_what_is_not_supported_is_refused(job: Any) -> None:
    data = TensorDataset(Fit("")._data()[0].tensors[0])
    loader = AdaptiveDataLoader(data, 6)
    options = {**Elastic.devices(), "logger": False, "enable_checkpointing": False}
    elastic = {"callbacks": [Elastic()], **options}
    with pytest.raises(ElasticRunError, match="does not support max_steps"):
        Trainer(max_steps=3, **elastic).fit(Net(), loader)
    with pytest.raises(TypeError, match="got a DataLoader, whose batches depend"):
        Trainer(max_epochs=1, **elastic).fit(Net(), DataLoader(data, 6))


def test_after_the_fit_any_loader_is_taken(job: Any) -> None:
    data = Fit("")._data()[0]
    trainer = Trainer(
        max_epochs=1,
        callbacks=[Elastic()],
        logger=False,
        enable_checkpointing=False,
        **Elastic.devices(),
    )
    own = AdaptiveDataLoader(data, 6, shuffle=True)
    net = Net()
    trainer.fit(net, own)
    first, again = (trainer.validate(net, x) for x in (own, DataLoader(data, 6)))
    assert first[0]["valid"] == pytest.approx(again[0]["valid"], rel=1e-5)
