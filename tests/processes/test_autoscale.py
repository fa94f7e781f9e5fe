"""Batch sizes that the job decides, through kills, at other numbers of replicas."""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun.testing import (
    read_trace,
    run_generation,
    samples_of_loop,
    start_generation,
)
from tests.support.autoscale import NUM_EPOCHS, NUM_SAMPLES, Program
from tests.support.variants import in_wide

Batches = dict[int, dict[int, list[int]]]  # By epoch.


def variables(program: Program) -> dict[str, str]:
    return {"ELASTICRUN_TRACE": f"{program.directory}-trace", "OMP_NUM_THREADS": "1"}


def run(program: Program, world_size: int) -> list[torch.Tensor]:
    """Run to the end; return the parameters."""
    results = run_generation(program, world_size, variables=variables(program))
    parameters: list[torch.Tensor] = results[0]
    return parameters


def run_until_killed(program: Program, world_size: int) -> bool:
    """Run a generation that is to be killed; return whether it came to that."""
    with start_generation(program, world_size, variables=variables(program)) as started:
        outcomes = started.wait(timeout=300)
    was_killed = any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes)
    assert was_killed or all(outcome.exit_code == 0 for outcome in outcomes)
    return was_killed


def recorded(program: Program) -> dict[int, int]:
    """Return the plan in the newest checkpoint."""
    paths = Path(program.directory).glob("checkpoint-*/manifest.json")
    values = json.loads((max(paths).parent / "loader.train").read_text())
    return {0: values["batch_size"], **dict(values.get("decided_batch_sizes", []))}


def delivered(program: Program, num_epochs: int) -> Batches:
    lines = read_trace(f"{program.directory}-trace")
    return {e: samples_of_loop(lines, epoch=e, loop=0) for e in range(num_epochs)}


def assert_as_planned(
    program: Program, parameters: Any, world_size: int, *, is_exact: bool
) -> None:
    """Replay the recorded plan in one piece, and compare samples and parameters."""
    plan = recorded(program)
    assert len(plan) > 2, "hardly anything was decided"
    directory = f"{program.directory}-replayed"
    replayed = replace(program, directory=directory, sizes=plan, kill_in=-1, kill_at=-1)
    tolerance = 0 if is_exact else 1e-9
    for one, other in zip(run(replayed, world_size), parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    num_epochs = NUM_EPOCHS if program.by_epochs else 1
    batches, expected = (delivered(p, num_epochs) for p in (program, replayed))
    for epoch in range(num_epochs):
        # What was delivered after the last checkpoint before a kill, and had a number
        # that the loop has not come to again, was lost with it.
        own = {number: batches[epoch][number] for number in expected[epoch]}
        assert own == expected[epoch]
        if program.by_epochs:
            samples = [sample for batch in own.values() for sample in batch]
            assert sorted(samples) == list(range(NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_epochs", "num_workers"),
    [
        *[(True, 2), (False, 0)],
        *in_wide((True, 0), (False, 2)),
    ],
)
def test_the_recorded_plan_gives_the_same_batches_and_bits(
    tmp_path: Path, by_epochs: bool, num_workers: int
) -> None:
    program = Program(
        str(tmp_path / "job"), by_epochs=by_epochs, num_workers=num_workers
    )
    assert_as_planned(program, run(program, 2), 2, is_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("by_epochs", [True, *in_wide(False)])
def test_kills_in_every_batch_lose_no_sample(tmp_path: Path, by_epochs: bool) -> None:
    program = Program(str(tmp_path / "job"), by_epochs=by_epochs)
    for kill_in in itertools.count(1):
        if not run_until_killed(replace(program, kill_in=kill_in % 3 + 1), 1):
            break
    assert kill_in > 5
    assert_as_planned(program, run(program, 1), 1, is_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("world_sizes", [*in_wide(((1,),)), (2, 3, 1)])
def test_kills_within_saves_lose_no_sample(
    tmp_path: Path, world_sizes: tuple[int, ...]
) -> None:
    is_one_size = len(world_sizes) == 1
    program = Program(str(tmp_path / "job"), scaling="auto" if is_one_size else "sqrt")
    num_kills = 0
    for kill_at, world_size in zip(
        itertools.count(9, 4), itertools.cycle(world_sizes), strict=False
    ):
        if not run_until_killed(replace(program, kill_at=kill_at), world_size):
            break
        num_kills += 1
    assert num_kills > 3
    assert_as_planned(program, run(program, 1), 1, is_exact=is_one_size)


@pytest.mark.slow
def test_kills_at_1_3_and_2_replicas_lose_no_sample(tmp_path: Path) -> None:
    program = Program(str(tmp_path / "job"), scaling="sqrt")
    for world_size, kill_in in ((1, 4), (3, 5), (2, 3)):
        assert run_until_killed(replace(program, kill_in=kill_in), world_size)
    assert_as_planned(program, run(program, 2), 2, is_exact=False)


@pytest.mark.slow
def test_whoever_does_not_hear_that_a_decision_was_saved_ends(tmp_path: Path) -> None:
    program = Program(str(tmp_path / "job"), scaling="sqrt")
    missed = replace(program, is_missed=True)
    with start_generation(missed, 2, variables=variables(program)) as started:
        outcomes = started.wait(timeout=300)
    assert "AgreementError: rank 0 did not come" in (outcomes[1].error or "")
    assert outcomes[0].exit_code != 0  # It cannot step alone.
    assert len(recorded(program)) == 2
    assert_as_planned(program, run(program, 2), 2, is_exact=True)
