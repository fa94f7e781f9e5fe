"""States of which each replica has a part, saved and loaded by real replicas."""

from __future__ import annotations

import functools
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticrun
from elasticrun import AdaptiveDataLoader, request_checkpoint
from elasticrun.testing import run_generation, start_generation
from tests.checkpoint.inspection.running import flip_byte, run
from tests.support.full_disk import fail_for_space
from tests.support.sharding import (
    DyingState,
    FailingState,
    Sharded,
    die,
    make_net,
    stopping_at,
    train_on_a_mesh,
)
from tests.support.stage import DEADLINE, Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

TIMEOUT = 300.0
ROUNDING = 1e-12


def run_on(stage: Stage, world_size: int, script: Any, *args: Any) -> list[Any]:
    return run_generation(
        script, world_size, *args, timeout=TIMEOUT, variables=stage.variables()
    )


@functools.cache
def uninterrupted(world_size: int = 1) -> Any:
    """Return what the training ends with if nobody interrupts it."""
    script = Sharded(is_sharded=world_size > 1)
    with tempfile.TemporaryDirectory() as directory:
        return run_on(Stage(Path(directory)), world_size, script)[0]


def assert_alike(result: Any, expected: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


# Restarts


@pytest.mark.parametrize("max_local_batch_size", [*in_wide(None), 2])
def test_restarts_at_other_world_sizes_end_alike(
    stage: Stage, max_local_batch_size: int | None
) -> None:
    def script(*stop: int, is_sharded: bool = True) -> Sharded:
        return Sharded(
            *([stopping_at(*stop)] if stop else []),
            is_sharded=is_sharded,
            max_local_batch_size=max_local_batch_size,
        )

    assert run_on(stage, 4, script(0, 1)) == [None] * 4
    assert run_on(stage, 2, script(0, 4)) == [None] * 2
    assert run_on(stage, 1, script(1, 1, is_sharded=False)) == [None]
    for result in run_on(stage, 3, script()):
        assert_alike(result, uninterrupted(), ROUNDING)


def test_a_restart_at_the_same_world_size_is_exact_to_the_bit(stage: Stage) -> None:
    run_on(stage, 3, Sharded(stopping_at(0, 3)))
    run_on(stage, 3, Sharded(stopping_at(1, 2)))
    for result in run_on(stage, 3, Sharded()):
        assert_alike(result, uninterrupted(3))


def test_what_a_killed_replica_had_since_the_checkpoint_is_done_again(
    stage: Stage,
) -> None:
    def body(net: nn.Module, loader: AdaptiveDataLoader) -> None:
        if loader.batch_index == 2:
            request_checkpoint()
        if loader.batch_index == 4 and elasticrun.rank() == 1:
            wait_until(stage.committed)
            die()

    with start_generation(Sharded(body), 3, variables=stage.variables()) as started:
        outcomes = started.wait(timeout=DEADLINE)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert [each.exit_code for each in (outcomes[0], outcomes[2])] == [1, 1]
    assert len(stage.committed()) == 1
    assert_alike(run_on(stage, 2, Sharded())[0], uninterrupted(), ROUNDING)


# Faults while they save


class Failing:
    """Saves after each batch; one rank fails in the second save."""

    def __init__(self, rank: int, fail: Any) -> None:
        self._rank, self._fail = rank, fail

    def __call__(self) -> Any:
        FailingState(self._rank, self._fail, 1)
        return Sharded(lambda net, loader: request_checkpoint())()


@pytest.mark.parametrize("killed", [*in_wide(0), 1])
def test_a_replica_that_dies_while_it_saves_tears_no_checkpoint(
    stage: Stage, killed: int
) -> None:
    with start_generation(
        Failing(killed, die), 2, variables=stage.variables()
    ) as started:
        outcomes = started.wait(timeout=DEADLINE)
    assert outcomes[killed].exit_code == -signal.SIGKILL
    assert outcomes[1 - killed].exit_code == 1
    assert len(stage.committed()) == 1
    assert_alike(run_on(stage, 2, Sharded())[0], uninterrupted(), ROUNDING)


def test_a_stop_does_not_wait_for_who_is_gone(stage: Stage) -> None:
    def script() -> Any:
        stage.keep_log(os.environ["RANK"])
        DyingState()
        return Sharded(stopping_at(0, 1))()

    with start_generation(script, 3, variables=stage.variables()) as started:
        outcomes = started.wait(timeout=DEADLINE)
    assert [each.exit_code for each in outcomes] == [75, -signal.SIGKILL, 75]
    assert stage.committed() == []
    for rank in (0, 2):
        assert "could not agree on who saves what of 'model'" in stage.log(rank)


@pytest.mark.parametrize("failing", [*in_wide(0), 1])
def test_a_save_that_one_rank_cannot_finish_changes_nothing(
    stage: Stage, failing: int
) -> None:
    def script() -> Any:
        stage.keep_log(os.environ["RANK"])
        FailingState(failing, fail_for_space, 1)

        def body(net: nn.Module, loader: AdaptiveDataLoader) -> None:
            if loader.batch_index in (1, 3):
                request_checkpoint()

        return Sharded(body)()

    results = run_on(stage, 2, script)
    assert_alike(results[0], uninterrupted(), ROUNDING)
    for rank in range(2):
        assert "No space left on device" in stage.log(rank)
    assert len(stage.committed()) > 1


class Unwilling(nn.Linear):
    """Cannot say its state on one rank, from some time on."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if elasticrun.rank() == 1 and hasattr(self, "refuses"):
            raise ZeroDivisionError("rank 1 only")
        return super().state_dict(*args, **kwargs)


def save_unwillingly(directory: str) -> str:
    elasticrun.init(directory, save_interval="off")
    net = Unwilling(4, 4)
    torch.distributed.fsdp.fully_shard(net)
    elasticrun.register(model=net)
    elasticrun.save_all_states()
    net.refuses = True
    try:
        elasticrun.save_all_states()
    except (ZeroDivisionError, elasticrun.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_state_that_one_rank_cannot_give_is_an_error_on_all(tmp_path: Path) -> None:
    told = run_generation(save_unwillingly, 3, str(tmp_path), timeout=TIMEOUT)
    by_others = (
        "CheckpointError: 'model' could not be saved, because rank 1 failed: "
        "ZeroDivisionError: rank 1 only"
    )
    assert told == [by_others, "ZeroDivisionError: rank 1 only", by_others]
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == [
        "checkpoint-00000001"
    ]


def save_other_modules(directory: str) -> str:
    elasticrun.init(directory, save_interval="off")
    net = nn.Sequential(nn.Linear(4, 4, bias=elasticrun.rank() == 0))
    torch.distributed.fsdp.fully_shard(net[0], mesh=own_mesh())
    elasticrun.register(model=net)
    try:
        elasticrun.save_all_states()
    except elasticrun.CheckpointError as error:
        return str(error)
    return "saved"


def own_mesh() -> Any:
    """Return a mesh of this rank alone."""
    rows = torch.arange(elasticrun.world_size())[:, None]
    mesh = torch.distributed.DeviceMesh("cpu", rows, mesh_dim_names=("stage", "data"))
    return mesh["data"]


def test_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    told = run_generation(save_other_modules, 2, str(tmp_path), timeout=TIMEOUT)
    assert told == [told[0]] * 2
    assert re.search(
        r"'model' is not the same on all replicas: rank 0 has '0\.bias', rank 1 has",
        told[0],
    )


# Damage


def test_a_damaged_shard_is_named_and_fallen_back_from(stage: Stage) -> None:
    def script() -> Any:
        stage.keep_log(os.environ["RANK"])
        return Sharded()()

    run_on(stage, 4, Sharded(stopping_at(0, 1)))
    run_on(stage, 4, Sharded(stopping_at(0, 3)))
    older, newer = sorted(stage.checkpoints.glob("checkpoint-*"))
    flip_byte(newer / "optimizer.rank-2")
    results = run_on(stage, 2, script)
    assert_alike(results[0], uninterrupted(), ROUNDING)
    assert f"{newer.name} is skipped: {newer}/optimizer.rank-2 has" in stage.log(0)
    assert f"resumes from {older.name}" in stage.log(0)


# Meshes


@pytest.mark.parametrize(
    ("before", "size_before", "after", "size_after"),
    [
        *[("both", 4, "sharded", 3), ("sharded", 3, "tensor", 2)],
        *in_wide(
            ("both", 4, "both", 4),
            ("both", 4, "bare", 1),
            ("tensor", 2, "both", 4),
            ("sharded", 3, "replicated", 4),
            ("replicated", 4, "sharded", 2),
            ("replicated", 4, "tensor", 4),
        ),
    ],
)
def test_any_mesh_loads_what_another_has_saved(
    stage: Stage, before: str, size_before: int, after: str, size_after: int
) -> None:
    saved = run_on(stage, size_before, train_on_a_mesh, before, 3)
    loaded = run_on(stage, size_after, train_on_a_mesh, after, 0)
    for each in [*saved, *loaded]:
        assert_alike(each, saved[0])


def test_shards_that_several_replicas_have_are_written_once(stage: Stage) -> None:
    run_on(stage, 4, train_on_a_mesh, "replicated", 1)
    [path] = stage.checkpoints.glob("checkpoint-*")
    sizes = [(path / f"model.rank-{rank}").stat().st_size for rank in range(4)]
    num_bytes = sum(p.numel() * 8 for p in nn.Linear(6, 8).parameters())
    num_bytes += sum(p.numel() * 8 for p in nn.Linear(8, 4).parameters())
    assert num_bytes <= sum(sizes) < 1.5 * num_bytes
    assert max(sizes) < 0.6 * num_bytes


# Looking into them


def test_a_sharded_model_is_shown_and_exported(stage: Stage, tmp_path: Path) -> None:
    result = run_on(stage, 3, Sharded())[0]
    assert run(stage.checkpoints, "verify").code == 0
    lines = run(stage.checkpoints, "show", "newest", "model").lines
    assert [line.split(maxsplit=1)[0] for line in lines] == ["model", *result[0]]
    assert "float64 [7, 5]" in lines[1]
    target = tmp_path / "model.pt"
    assert run(stage.checkpoints, "export", "newest", target).code == 0
    net = make_net()
    net.load_state_dict(torch.load(target))
    assert_alike(dict(net.state_dict()), result[0])
    target = tmp_path / "optimizer.pt"
    run(stage.checkpoints, "export", "newest", target, "--state", "optimizer")
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(torch.load(target))
    assert_alike(optimizer.state_dict(), result[1])
