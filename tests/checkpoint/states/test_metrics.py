"""Registered metrics go on where they were, whatever each replica has seen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun.testing import run_generation
from elasticrun.testing.replicas import GenerationFailed
from tests.support.forkservers import forks_that_have_imported

TIMEOUT = 600.0  # Of what hangs: importing torchmetrics may take a minute.

pytest.importorskip("torchmetrics", reason="requirements-dev.txt installs it")


@pytest.fixture(autouse=True)
def _metrics_in_forks() -> Iterator[None]:
    with forks_that_have_imported("tests.support.metrics"):
        yield


@pytest.mark.parametrize(
    ("sizes", "is_parallel"),
    [
        ((1, 1), False),
        ((2, 3), True),
        pytest.param((3, 1), False, marks=pytest.mark.slow),
    ],
)
def test_metrics_of_torchmetrics_are_merged(
    tmp_path: Path, sizes: tuple[int, int], is_parallel: bool
) -> None:
    from tests.support.metrics import measure

    def run(directory: str, *, leaves: bool) -> Any:
        return measure(directory, leaves=leaves, is_parallel=is_parallel)

    first, second = sizes
    found = []
    for leaves, world_size in ((True, first), (False, second)):
        found = run_generation(
            functools.partial(run, leaves=leaves),
            world_size,
            str(tmp_path),
            timeout=TIMEOUT,
        )
    numbers = torch.arange(24.0)
    for each in found:
        assert each["all"] == numbers.tolist()
        assert each["sum"] == numbers.sum()
        assert each["mean"] == each["in the model"] == numbers.mean()
        assert (each["least"], each["largest"]) == (0, 23)
        assert each["recall"] == pytest.approx(4 / 12)
        assert each["precision"] == pytest.approx(4 / 8)
        assert each["matrix"] == [[8, 4], [8, 4]]
        assert each["kappa"] == pytest.approx(0)


def test_what_counts_on_each_replica_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    from tests.support.metrics import count

    with pytest.raises(
        GenerationFailed,
        match=r"'metric' \(Counting\) has another state on rank 1 than on rank 0\.",
    ):
        run_generation(count, 2, str(tmp_path), timeout=TIMEOUT)
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_a_metric_that_does_not_say_how_it_is_merged_is_refused(
    tmp_path: Path,
) -> None:
    from tests.support.metrics import register_correlation

    run_generation(register_correlation, 1, str(tmp_path), timeout=TIMEOUT)
    with pytest.raises(
        GenerationFailed, match=r"metric 'metric.mean_x' \(PearsonCorrCoef\) cannot be"
    ):
        run_generation(register_correlation, 2, str(tmp_path), timeout=TIMEOUT)
