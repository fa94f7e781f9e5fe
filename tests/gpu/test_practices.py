"""What people do on GPUs: a restart does not show, nor does the number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elasticrun.testing import run_generation
from tests.gpu.practices import check_that_a_restart_does_not_show, contexts, train

# How far a sum in another order, in the precision of the practice, may lead away.
TOLERANCES = {
    "plain": 1e-5,
    "device_ids": 1e-5,
    "norm": 1e-5,
    "pinned": 1e-5,
    "compile": 1e-4,
    "graphs": 1e-4,
    "bf16": 3e-2,
    "fp16": 1e-2,
}


@pytest.mark.parametrize("practice", TOLERANCES)
def test_a_restart_does_not_show(tmp_path: Path, practice: str) -> None:
    """Steps 2 and 3 are in the middle of an epoch and at its end, 4 in the next."""
    check_that_a_restart_does_not_show(tmp_path, practice, stops=(2, 3, 4))


@pytest.mark.gpus
@pytest.mark.parametrize("max_local_batch_size", [None, 3])
@pytest.mark.parametrize("practice", sorted({*TOLERANCES, "fsdp"} - {"norm"}))
def test_two_replicas_and_micro_batches_end_as_one(
    tmp_path: Path, practice: str, max_local_batch_size: int | None
) -> None:
    """All but BatchNorm, which sees one local batch at a time."""
    (one,) = run_generation(train, 1, "plain", str(tmp_path / "one"), None, None, 0.0)
    cut, tolerance = str(tmp_path / "two"), TOLERANCES.get(practice, 1e-5)
    more = (max_local_batch_size, 0.0)
    assert run_generation(train, 2, practice, cut, 2, *more) == [None] * 2
    both = run_generation(train, 2, practice, cut, None, *more)
    for got in both:
        for a, b in zip(one, got, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.gpus
def test_each_replica_has_a_context_on_its_own_gpu_alone() -> None:
    assert run_generation(contexts, 2) == [("cuda:0", [0]), ("cuda:1", [1])]


@pytest.mark.gpus
def test_a_restart_from_two_replicas_to_one_and_back(tmp_path: Path) -> None:
    (calm,) = run_generation(train, 1, "plain", str(tmp_path / "calm"), None, None, 0.0)
    cut = str(tmp_path / "cut")
    assert run_generation(train, 2, "plain", cut, 2, None, 0.0) == [None, None]
    assert run_generation(train, 1, "plain", cut, 2, None, 0.0) == [None]
    for got in run_generation(train, 2, "plain", cut, None, None, 0.0):
        for a, b in zip(calm, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
