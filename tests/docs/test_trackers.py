"""The recipes for trackers: each point is there once, wherever the job is killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticrun
from elasticrun import request_checkpoint
from tests.docs.documents import ROOT
from tests.support.generations import Crash, run_once

PAGE = (ROOT / "docs" / "howto" / "trackers.md").read_text(encoding="utf-8")
TENSORBOARD, MLFLOW = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
NUM_STEPS, NUM_EPOCHS = 12, 3
LOSSES = list(enumerate(float(step) for step in range(NUM_STEPS)))
ACCURACIES = [(epoch, 0.5 + epoch) for epoch in range(NUM_EPOCHS)]

Points = list[tuple[int, float]]


def run_with_kills(
    code: str, directory: Path, forget: Callable[[], object] = lambda: None
) -> None:
    """Run a recipe in several generations, which end after steps of any kind.

    A checkpoint is written after each third step, so that some are trained again.

    Args:
        forget: Called after each, for what ends with a process.
    """
    script = compile(code, "trackers.md", "exec")
    for kill_at in (2, 5, 8, 9, 11, NUM_STEPS + 1):
        names = names_for(kill_at)
        run_once(partial(exec, script, names), directory, async_save=False)
        forget()


def names_for(kill_at: int) -> dict[str, Any]:
    """Return what a recipe is assumed to have already."""
    rows = torch.arange(50.0).view(50, 1)
    names = {name: getattr(elasticrun, name) for name in elasticrun.__all__}

    def train_step(x: Any, y: Any) -> float:
        step = names["state"].step
        if step == kill_at:
            raise Crash
        if step % 3 == 1:
            request_checkpoint()
        return float(step)

    def evaluate() -> float:
        return 0.5 + (elasticrun.current_epoch() or 0)

    names["train_set"] = torch.utils.data.TensorDataset(rows, rows)
    names.update(train_step=train_step, evaluate=evaluate)
    return names


def test_tensorboard_shows_each_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    writing = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.chdir(tmp_path)
    # Files are read in the order of their names: of seconds, and of this within one.
    monkeypatch.setattr(writing, "_global_uid", writing.AtomicCounter(100))
    run_with_kills(TENSORBOARD, tmp_path / "checkpoints")

    def points(run: str, name: str) -> Points:
        read = reading.EventAccumulator(f"runs/{run}")
        read.Reload()
        return [(point.step, point.value) for point in read.Scalars(name)]

    assert points("steps", "loss") == LOSSES
    assert points("epochs", "accuracy") == ACCURACIES
    # There was something to leave out.
    files = Path("runs/steps").glob("events.*")
    assert sum(path.read_bytes().count(b"loss") for path in files) > NUM_STEPS


def test_mlflow_gets_each_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run_with_kills(MLFLOW, tmp_path / "checkpoints", forget=mlflow.end_run)
    (run,) = mlflow.search_runs(output_format="list")
    client = mlflow.MlflowClient()
    found: dict[str, Points] = {
        name: [
            (p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)
        ]
        for name in ("loss", "accuracy")
    }
    assert found == {"loss": LOSSES, "accuracy": ACCURACIES}
