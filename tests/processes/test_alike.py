"""Replicas that have made a loader differently say so, all of them, at its loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    CombinedLoader,
    rank,
    remaining_epochs_until,
)
from elasticrun.data import loader_state
from elasticrun.testing import GenerationFailed, run_generation
from tests.support.data import Numbers
from tests.support.stage import DEADLINE, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


class Looping:
    """Loops over a loader of which one argument depends on the rank."""

    def __init__(self, **by_rank: list[Any]) -> None:
        self.by_rank = by_rank

    def __call__(self) -> str:
        loader_state._WAIT_SECONDS = DEADLINE  # However late one of them comes.
        refusal = self.loop()
        dist.barrier()  # Rank 0's end would be that of the store.
        return refusal

    def loop(self) -> str:
        """Return why the loader is refused, if it is."""
        own = {key: values[rank()] for key, values in self.by_rank.items()}
        given = {"dataset": Numbers(12), "batch_size": 4, "name": "one", **own}
        try:
            for _ in self.looped_over(AdaptiveDataLoader(**given)):
                pass
        except ValueError as error:
            return str(error)
        return ""

    def looped_over(self, loader: AdaptiveDataLoader) -> Iterable[Any]:
        return loader


class LoopingOverBoth(Looping):
    """The same, of a member of a combined loader."""

    def looped_over(self, loader: AdaptiveDataLoader) -> Iterable[Any]:
        other = AdaptiveDataLoader(Numbers(12), 4, name="other")
        return CombinedLoader([other, loader], name="both")


@pytest.mark.parametrize(
    ("by_rank", "text"),
    [
        ({"seed": [3, 3, 5]}, "seed is 3 on rank 0, but 5 on rank 2"),
        ({"sampler": [[1, 2], [1, 2], [2, 1]]}, "order is "),
        *in_wide(
            ({"batch_size": [6, 4, 4]}, "batch_size is 6 on rank 0, but 4 on"),
            (
                {"dataset": [Numbers(12), Numbers(13), Numbers(12)]},
                "num_samples is 12 on rank 0, but 13 on rank 1",
            ),
            (
                {"drop_last": [True, True, False], "shuffle": [True, True, False]},
                "shuffle is True on rank 0, but False on rank 2; drop_last is True",
            ),
            (
                {"even_batches": [True, False, True]},
                "even_batches is True on rank 0, but False on rank 1",
            ),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_loaders_that_differ_are_refused_on_all_replicas(
    by_rank: dict[str, list[Any]], text: str
) -> None:
    refusals = run_generation(Looping(**by_rank), 3)
    assert len(set(refusals)) == 1
    assert "the replicas have made `one` differently" in refusals[0]
    assert text in refusals[0]


def test_so_are_members_that_differ() -> None:
    refusals = run_generation(LoopingOverBoth(seed=[3, 5]), 2)
    assert len(set(refusals)) == 1
    assert "the replicas have made `one` differently: seed is 3 on" in refusals[0]


def test_loaders_that_are_alike_are_not_refused() -> None:
    assert run_generation(Looping(seed=[7, 7]), 2) == ["", ""]


class ComingOneByOne(Looping):
    """As `Looping`, but one rank makes its loader when the other has looped over it."""

    def __init__(self, first: int, directory: Path) -> None:
        super().__init__(seed=[3, 5])
        self.first = first
        self.has_looped = directory / "has looped"
        self.has_compared = directory / "has compared"

    def __call__(self) -> str:
        loader_state._WAIT_SECONDS = 0.0
        if rank() != self.first:
            wait_until(self.has_looped.exists)
        refusal = self.loop()
        if rank() == self.first:  # Rank 0's end would be that of the store.
            self.has_looped.touch()
            wait_until(self.has_compared.exists)
        else:
            self.has_compared.touch()
        return refusal


@pytest.mark.parametrize("first", [0, *in_wide(1)])
def test_who_comes_last_refuses_a_loader_that_differs(
    first: int, tmp_path: Path
) -> None:
    refusals = run_generation(ComingOneByOne(first, tmp_path), 2)
    assert refusals[first] == ""
    assert "seed is 3 on rank 0, but 5 on rank 1" in refusals[1 - first]


def make_one_alone() -> int:
    """Rank 0 has a loader more, and loops over it by itself."""
    loaders = [AdaptiveDataLoader(Numbers(12), 4, name="all")]
    if rank() == 0:
        loaders.append(AdaptiveDataLoader(Numbers(5), 2, name="own"))
    return sum(1 for loader in loaders for _ in loader)


def test_a_loader_of_one_replica_alone_hangs_nobody() -> None:
    assert run_generation(make_one_alone, 2) == [3 + 3, 3]


def validate_on_rank_0_alone() -> None:
    train = AdaptiveDataLoader(Numbers(16), 4, name="train")
    valid = AdaptiveDataLoader(Numbers(16), 4, name="valid")
    for _ in remaining_epochs_until(2):
        for _ in train:
            pass
        if rank() == 0:
            for _ in valid:
                pass


def test_a_loop_of_one_replica_alone_is_told_from_a_break(tmp_path: Path) -> None:
    variables = {
        "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
        "ELASTICRUN_SAVE_INTERVAL": "off",
        "ELASTICRUN_SAVE_EVERY": "6",  # Rank 0 is in `valid` then.
    }
    with pytest.raises(
        GenerationFailed,
        match=r"sample \d+ of `valid`, but rank 1 at .* of `train`\. "
        "Replicas must run the same epochs and loops: run no loop on one rank only",
    ):
        run_generation(validate_on_rank_0_alone, 2, variables=variables)
