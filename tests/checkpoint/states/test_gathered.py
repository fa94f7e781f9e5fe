"""Small states of each rank's own, of which rank 0 writes many into a file."""

from __future__ import annotations

import random

import pytest
import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.generators import Generators, seed_all
from elasticrun.checkpoint.states.per_rank import write_per_rank
from elasticrun.checkpoint.store import CheckpointStore
from tests.support.stores import manifest

WORLD_SIZE = 130


def generators() -> Generators:
    return Generators(torch.device("cpu"))


def told_by(rank: int) -> bytes:
    seed_all(rank)
    return generators().capture()


def commit_all(store: CheckpointStore) -> Checkpoint:
    draft = store.begin(1)
    records = write_per_rank(
        draft,
        "random",
        lambda ranks: {rank: told_by(rank) for rank in ranks},
        world_size=WORLD_SIZE,
    )
    return draft.commit(manifest(1, *records))


def drawn_after_loading(checkpoint: Checkpoint, rank: int) -> float:
    registry, state = Registry(rank), generators()
    registry.add(state)
    assert registry.load(state, checkpoint)
    state.restore()
    return random.random()


def test_each_rank_finds_its_own_among_those_of_many(
    local_store: CheckpointStore,
) -> None:
    checkpoint = commit_all(local_store)
    assert checkpoint.names() == (
        "random.ranks-0",
        "random.ranks-64",
        "random.ranks-128",
    )
    assert list(checkpoint.names()) == generators().file_names(WORLD_SIZE)
    for rank in (0, 1, 63, 64, 129):
        found = drawn_after_loading(checkpoint, rank)
        seed_all(rank)
        assert found == random.random()


@pytest.mark.parametrize("rank", [WORLD_SIZE, 500])  # In a file of others; in none.
def test_a_rank_that_is_new_derives_its_own(
    local_store: CheckpointStore, rank: int
) -> None:
    found = drawn_after_loading(commit_all(local_store), rank)
    expected = generators()
    expected.derive([told_by(0)], rank)
    expected.restore()
    assert found == random.random()
