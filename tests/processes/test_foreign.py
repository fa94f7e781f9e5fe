"""Real replicas of a trainer that owns its loop, stopped and killed, at other sizes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrun import rank, world_size
from elasticrun.testing import run_generation, start_generation
from tests.support.foreign import Trainer, delivered
from tests.support.programs import StopOnce

TIMEOUT = 600.0


def die_in_step_7(trainer: Trainer) -> None:
    if trainer.count.steps == 7 and rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_foreign_loop_at_1_2_1_3_2_replicas_ends_as_a_calm_one(
    tmp_path: Path,
) -> None:
    calm, cut = Trainer(str(tmp_path / "calm")), Trainer(str(tmp_path / "cut"))
    (expected,) = run_generation(calm, 1, timeout=TIMEOUT, variables=traced(calm))
    stopping = replace(cut, on_step=StopOnce())
    for num_replicas in (1, 2, 1):  # Each takes one or two steps of eight.
        left = run_generation(
            stopping, num_replicas, timeout=TIMEOUT, variables=traced(cut)
        )
        assert left == [None] * num_replicas
    dying = replace(cut, on_step=die_in_step_7, save_interval=0)
    with start_generation(dying, 3, variables=traced(cut)) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[2].exit_code == -signal.SIGKILL
    ended = run_generation(cut, 2, timeout=TIMEOUT, variables=traced(cut))
    for result in ended:
        for name, values in expected["parameters"].items():
            assert result["parameters"][name] == pytest.approx(values, abs=1e-12)
        assert result["count"] == expected["count"]
    assert ended[0]["log"] == expected["log"]
    assert delivered(cut.directory + "-t") == delivered(calm.directory + "-t")


def traced(trainer: Trainer) -> dict[str, str]:
    return {"ELASTICRUN_TRACE": trainer.directory + "-t"}
