"""The sampler's global batches do not depend on the number of replicas."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, IterableDataset

from elasticrun.data.samplers import ElasticSampler

TOTAL_BATCH = 12
replica_counts = st.sampled_from([1, 2, 3, 4, 6, 12])


def epoch_order(num_samples: int, shuffle: bool, epoch: int) -> list[int]:
    """Return the order that one replica sees from the start."""
    sampler = ElasticSampler(range(num_samples), shuffle, seed=7)
    sampler.set_epoch(epoch)
    return list(sampler)


def global_batches(
    num_samples: int,
    shuffle: bool,
    *,
    epoch: int,
    index: int,
    num_replicas: int,
    drop_last: bool = False,
) -> list[list[int]]:
    """Return each step's samples, over the replicas, in the order of positions."""
    samplers = [
        ElasticSampler(
            range(num_samples),
            shuffle,
            seed=7,
            num_replicas=num_replicas,
            rank=rank,
            drop_last=drop_last,
        )
        for rank in range(num_replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch, index)
    by_rank = [list(sampler) for sampler in samplers]
    assert [len(indices) for indices in by_rank] == [len(s) for s in samplers]
    delivered = [sample for row in zip(*by_rank, strict=True) for sample in row]
    return [
        delivered[start : start + TOTAL_BATCH]
        for start in range(0, len(delivered), TOTAL_BATCH)
    ]


@given(
    num_samples=st.integers(0, 200) | st.integers(5000, 5100),
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
    num_replicas=replica_counts,
    data=st.data(),
)
def test_global_batches_do_not_depend_on_the_replicas(
    num_samples: int,
    shuffle: bool,
    epoch: int,
    num_replicas: int,
    data: st.DataObject,
) -> None:
    index = data.draw(st.integers(0, num_samples))
    order = epoch_order(num_samples, shuffle, epoch)
    assert sorted(order) == list(range(num_samples))
    left = order[index:]
    batches = global_batches(
        num_samples, shuffle, epoch=epoch, index=index, num_replicas=num_replicas
    )
    delivered = [sample for batch in batches for sample in batch]
    num_padding = -len(left) % num_replicas
    padding = [order[place % num_samples] for place in range(num_padding)]
    assert delivered == left + padding


@given(
    num_samples=st.integers(0, 200),
    num_replicas=st.integers(1, 16),
    data=st.data(),
)
def test_drop_last_cuts_where_it_would_pad(
    num_samples: int, num_replicas: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, num_samples))
    left = epoch_order(num_samples, True, 0)[index:]
    batches = global_batches(
        num_samples,
        True,
        epoch=0,
        index=index,
        num_replicas=num_replicas,
        drop_last=True,
    )
    delivered = [sample for batch in batches for sample in batch]
    assert delivered == left[: len(left) // num_replicas * num_replicas]


@given(
    num_samples=st.integers(1, 200),
    generations=st.lists(st.tuples(replica_counts, st.integers(0, 5)), max_size=6),
    last=replica_counts,
)
def test_any_sequence_of_replica_counts_continues_exactly(
    num_samples: int, generations: list[tuple[int, int]], last: int
) -> None:
    done: list[list[int]] = []
    for num_replicas, num_steps in [*generations, (last, num_samples)]:
        index = min(len(done) * TOTAL_BATCH, num_samples)
        done += global_batches(
            num_samples, True, epoch=2, index=index, num_replicas=num_replicas
        )[:num_steps]
    order = epoch_order(num_samples, True, 2)
    delivered = [sample for batch in done for sample in batch]
    assert delivered[:num_samples] == order
    num_padding = len(delivered) - num_samples
    assert Counter(delivered) - Counter(order) == Counter(
        order[place % num_samples] for place in range(num_padding)
    )


def test_fewer_samples_left_than_replicas_still_gives_each_one() -> None:
    order = epoch_order(3, True, 0)
    batches = global_batches(3, True, epoch=0, index=2, num_replicas=8)
    assert batches == [[order[2], *(order * 3)[:7]]]


def test_epochs_seeds_and_ranks_order_differently() -> None:
    assert epoch_order(50, True, 0) != epoch_order(50, True, 1)
    assert list(ElasticSampler(range(50), seed=8)) != epoch_order(50, True, 0)
    assert epoch_order(50, False, 3) == list(range(50))


def test_shuffling_is_the_default() -> None:
    assert list(ElasticSampler(range(50))) != list(range(50))


def test_an_iteration_is_not_shifted_by_a_later_set_epoch() -> None:
    sampler = ElasticSampler(range(50))
    expected = list(sampler)
    running = iter(sampler)
    sampler.set_epoch(1, 20)
    assert list(running) == expected
    assert len(list(sampler)) == 30


def test_set_epoch_without_an_index_starts_at_the_front() -> None:
    sampler = ElasticSampler(range(50))
    sampler.set_epoch(0, 20)
    sampler.set_epoch(0)
    assert len(sampler) == 50


def test_a_data_loader_takes_it() -> None:
    sampler = ElasticSampler(range(10), False, num_replicas=2, rank=1)
    sampler.set_epoch(0, 4)
    dataset: Any = range(10)
    loader: DataLoader[int] = DataLoader(dataset, batch_size=2, sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[5, 7], [9]]


class Huge:
    def __len__(self) -> int:
        return 10**12


def test_memory_and_time_do_not_grow_with_the_data_set() -> None:
    sampler = ElasticSampler(Huge(), num_replicas=3, rank=1)
    tracemalloc.start()
    try:
        sampler.set_epoch(4, 9 * 10**11)
        first = next(iter(sampler))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 <= first < 10**12
    assert len(sampler) == -(-(10**11) // 3)
    assert peak < 2_000_000


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_the_process_group_says_which_rank_this_is(rank_2_of_4: None) -> None:
    assert list(ElasticSampler(range(8), False)) == [2, 6]
    assert list(ElasticSampler(range(8), False, num_replicas=8, rank=1)) == [1]


def test_without_a_process_group_the_environment_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(ElasticSampler(range(3), False)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 0}, "rank=0 with num_replicas=0"),
        ({"num_replicas": 2, "rank": 2}, "rank=2 with num_replicas=2: .* below"),
        ({"num_replicas": 2, "rank": -1}, "rank=-1 with num_replicas=2"),
        ({"rank": 1}, "rank=1 with num_replicas=1: .* Give both, or neither"),
    ],
)
def test_impossible_ranks_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticSampler(range(8), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["seed", "num_replicas", "rank"])
def test_numbers_must_be_integers(name: str) -> None:
    with pytest.raises(TypeError, match="as an integer"):
        ElasticSampler(range(8), **{name: 0.5})  # type: ignore[arg-type]


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match="Stream.* has no len"):
        ElasticSampler(Stream())  # type: ignore[arg-type]


def test_an_impossible_place_is_refused() -> None:
    sampler = ElasticSampler(range(8))
    for index in (-1, 9):
        with pytest.raises(ValueError, match=f"index={index}: .* from 0 to 8"):
            sampler.set_epoch(0, index)
    with pytest.raises(ValueError, match="epoch=-1, .* counted from 0"):
        sampler.set_epoch(-1)
    with pytest.raises(TypeError, match="as an integer"):
        sampler.set_epoch(0, 1.5)  # type: ignore[arg-type]
