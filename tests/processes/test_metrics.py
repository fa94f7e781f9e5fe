"""Sums over real replicas: the same bits at any number of them, or a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    Variables,
    rank,
    remaining_epochs_until,
    save_all_states,
)
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.programs import request_stop_and_wait
from tests.support.stage import Stage


def script(stop_before: int | None, *, even_batches: bool) -> Callable[[], Any]:
    """Return a job that adds up what floating point would round in every order."""

    def run() -> Any:
        train = AdaptiveDataLoader(Numbers(23), 5, even_batches=even_batches)
        valid = AdaptiveDataLoader(Numbers(11), 4, even_batches=even_batches)
        total = Accumulator()
        seen = []
        for epoch in remaining_epochs_until(4):
            for loader in (train, valid):
                for batch in loader:
                    for number in batch[: loader.num_valid].tolist():
                        total["sum"] += 0.1 * number
                        total[f"rank-{number % 3}"] += 1
                    total["samples"] += loader.num_valid
                    here = epoch * 10 + loader.batch_index
                    if here == stop_before and loader is valid and rank() == 0:
                        request_stop_and_wait()
                with total.synchronized():
                    seen.append((epoch, loader.name, sorted(total.items())))
                    total.clear()
        return seen

    return run


@pytest.mark.parametrize("even_batches", [True, False])
def test_sums_do_not_depend_on_replicas_and_restarts(
    stage: Stage, even_batches: bool
) -> None:
    [whole] = run_generation(script(None, even_batches=even_batches), 1)
    expected = {(epoch, name): sums for epoch, name, sums in whole}
    for world_size, stop in ((3, 1), (2, 21), (4, None)):
        values = run_generation(
            script(stop, even_batches=even_batches),
            world_size,
            variables=stage.variables(),
        )
    # The last generation replayed a block of the epoch that it began in.
    for value in values:
        seen = {(epoch, name): sums for epoch, name, sums in value}
        assert seen == {place: expected[place] for place in seen}
        assert (3, "loader-0") in seen
        assert dict(seen[3, "loader-0"])["samples"] == 23


def sum_in_variables() -> list[str]:
    """Save twice what a replica has summed of its own part, and what all have."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        score = Variables(sum=0.0, last=0, epoch=0, text="a", values=[rank()])
        for _ in remaining_epochs_until(1):
            loader = AdaptiveDataLoader(Numbers(12), 6, name="train")
            for batch in loader:
                score.sum += float(batch.sum())
                score.last = batch[-1]
                score.epoch = loader.batch_index
        save_all_states()
    return [str(warning.message) for warning in said]


def test_variables_that_differ_are_named_once(stage: Stage) -> None:
    [of_first, of_second] = run_generation(
        sum_in_variables, 2, variables=stage.variables(ELASTICRUN_SAVE_INTERVAL="off")
    )
    assert of_second == []
    (said,) = of_first
    differing = "variables.sum (rank 1); variables.last (rank 1). Rank 0's are saved"
    assert differing in said
