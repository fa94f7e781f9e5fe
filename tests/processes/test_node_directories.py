"""Nodes whose directories differ, or show late what another node has written."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun import current_job, init, save_all_states
from elasticrun.checkpoint import store
from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.testing import run_generation, start_generation
from tests.support.stage import DEADLINE, Stage, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Return a stage with two checkpoints, and in `elsewhere` a copy of the first."""
    stage = Stage(tmp_path)

    def save_twice() -> None:
        save_all_states()
        if current_job().rank == 0:
            shutil.copytree(stage.checkpoints, tmp_path / "elsewhere")
        save_all_states()

    run_generation(save_twice, 1, variables=stage.variables())
    assert stage.directories() == ["checkpoint-00000001", "checkpoint-00000002"]
    return stage


def start_apart(
    stage: Stage,
    follow: Callable[[Path, Path], object],
    *,
    before: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Start two replicas, the second with `elsewhere`; return how each ended.

    Args:
        follow: Runs beside the second one, with both directories.
        before: Called in it first.
    """

    def script() -> tuple[int, int]:
        elsewhere = stage.root / "elsewhere"
        if os.environ["RANK"] == "1":
            before()
            threading.Thread(
                target=follow, args=[stage.checkpoints, elsewhere], daemon=True
            ).start()
            init(elsewhere)
        newest = current_job().newest_checkpoint
        assert newest is not None
        return current_job().generation, newest.number

    with start_generation(script, 2, variables=stage.variables()) as generation:
        return generation.wait(timeout=DEADLINE)


def show_generation(source: Path, target: Path) -> None:
    """Let the second node see that rank 0 has begun, but nothing else."""
    before = (source / "generation").read_bytes()
    wait_until(lambda: (source / "generation").read_bytes() != before)
    shutil.copy(source / "generation", target / "next")
    os.rename(target / "next", target / "generation")


def refusals(outcomes: list[Any]) -> list[str]:
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    texts = [outcome.error or "" for outcome in outcomes]
    for text in texts:
        assert "the replicas see different checkpoints" in text
    return texts


def test_a_node_that_sees_only_an_older_checkpoint_makes_all_refuse(
    stage: Stage,
) -> None:
    for text in refusals(start_apart(stage, show_generation)):
        assert "rank 1: " in text
        assert f"{stage.root}/elsewhere/checkpoint-00000002 cannot be read" in text
        assert "but rank 0 has one with the digest" in text
    # Nothing was lost: with one directory for both the newest one is there.
    values = run_generation(
        lambda: current_job().newest_checkpoint.number,  # type: ignore[union-attr]
        2,
        variables=stage.variables(),
    )
    assert values == [2, 2]


def test_a_node_that_sees_a_newer_checkpoint_makes_all_refuse(stage: Stage) -> None:
    shutil.copytree(
        stage.checkpoints / "checkpoint-00000002",
        stage.root / "elsewhere" / "checkpoint-00000002",
    )
    (stage.checkpoints / "checkpoint-00000002" / MANIFEST_NAME).unlink()
    for text in refusals(start_apart(stage, show_generation)):
        assert f"{stage.root}/elsewhere on host" in text
        assert "has a checkpoint 2, but rank 0 sees none above 1" in text


def test_a_node_that_sees_all_of_it_late_goes_on_from_the_newest(stage: Stage) -> None:
    def look_for_long() -> None:
        store.LAG_SECONDS = DEADLINE
        store.time = SimpleNamespace(monotonic=time.monotonic, sleep=look_again)

    def look_again(seconds: float) -> None:
        stage.mark("has looked")
        time.sleep(seconds)

    def follow_late(source: Path, target: Path) -> None:
        show_generation(source, target)
        stage.wait_for("has looked")
        shutil.copytree(source / "checkpoint-00000002", target / "next")
        os.rename(target / "next", target / "checkpoint-00000002")

    outcomes = start_apart(stage, follow_late, before=look_for_long)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert [outcome.result for outcome in outcomes] == [(1, 2), (1, 2)]
