"""Every sample falls into one micro-batch of one replica in one global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.data.order.shares import BatchSplit, partition

world_sizes = st.integers(1, 20)
indices = st.integers(0, 10**12)


def joined(ranges: Iterable[range]) -> list[int]:
    return list(itertools.chain.from_iterable(ranges))


def num_micro_of(size: int, world_size: int, max_local_batch_size: int | None) -> int:
    shares = BatchSplit(0, world_size, max_local_batch_size, is_padded=True)
    return shares.num_micro(-(-size // world_size))


def test_ten_over_four_is_three_three_two_two() -> None:
    shares = [partition(range(100, 110), rank, num_parts=4) for rank in range(4)]
    assert shares == [
        range(100, 103),
        range(103, 106),
        range(106, 108),
        range(108, 110),
    ]


def test_ten_over_sixteen_leaves_six_without() -> None:
    shares = [partition(range(10), rank, num_parts=16) for rank in range(16)]
    assert [len(share) for share in shares] == [1] * 10 + [0] * 6


@given(index=indices, batch_size=st.integers(0, 500), world_size=world_sizes)
def test_shares_are_the_batch_in_order(
    index: int, batch_size: int, world_size: int
) -> None:
    shares = [
        partition(range(index, index + batch_size), rank, num_parts=world_size)
        for rank in range(world_size)
    ]
    assert joined(shares) == list(range(index, index + batch_size))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(
    index=indices,
    batch_size=st.integers(0, 500),
    world_size=world_sizes,
    max_local_batch_size=st.integers(1, 100),
)
def test_micro_batches_are_the_batch_in_order_and_fit(
    index: int, batch_size: int, world_size: int, max_local_batch_size: int
) -> None:
    num_micro = num_micro_of(batch_size, world_size, max_local_batch_size)
    micros_by_rank = [
        [partition(share, number, num_parts=num_micro) for number in range(num_micro)]
        for share in (
            partition(range(index, index + batch_size), rank, num_parts=world_size)
            for rank in range(world_size)
        )
    ]
    in_order = itertools.chain.from_iterable(micros_by_rank)
    assert joined(in_order) == list(range(index, index + batch_size))
    for micros in micros_by_rank:
        sizes = [len(micro) for micro in micros]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sizes[0] <= max_local_batch_size


@given(
    batch_size=st.integers(1, 500),
    world_size=world_sizes,
    max_local_batch_size=st.integers(1, 100),
)
def test_there_are_no_more_micro_batches_than_needed(
    batch_size: int, world_size: int, max_local_batch_size: int
) -> None:
    num_micro = num_micro_of(batch_size, world_size, max_local_batch_size)
    largest_share = partition(range(batch_size), 0, num_parts=world_size)
    assert (num_micro - 1) * max_local_batch_size < len(largest_share)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "max_local_batch_size", "num_micro"),
    [
        (10, 4, None, 1),
        (10, 4, 3, 1),
        (10, 4, 2, 2),
        (10, 4, 1, 3),
        (9, 1, 4, 3),
        (0, 4, 2, 1),
        (2, 4, 8, 1),
    ],
)
def test_the_largest_share_decides_for_all(
    batch_size: int, world_size: int, max_local_batch_size: int | None, num_micro: int
) -> None:
    assert num_micro_of(batch_size, world_size, max_local_batch_size) == num_micro


def test_a_small_share_leaves_micro_batches_empty() -> None:
    share = range(5, 6)
    micros = [partition(share, number, num_parts=3) for number in range(3)]
    assert [list(micro) for micro in micros] == [[5], [], []]
