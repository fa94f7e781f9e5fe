"""All replicas and generations together deliver each sample once, in equal batches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.batches import (
    Batches,
    ListedBatches,
    SizedBatches,
)
from elasticrun.data.order.maps import as_map, order_of_map
from elasticrun.data.order.permutation import Order, Permutation
from elasticrun.data.order.plan import LoopPlan, Seeding, loop_key
from elasticrun.data.order.shares import BatchSplit, EvenShares
from elasticrun.job.loop import NOTHING, MicroBatch

KEY = loop_key(0, 3, 1)


@dataclass(frozen=True)
class Setting:
    """A loader, and the generations in which one of its loops is delivered.

    Attributes:
        batch_size: Samples of a global batch; or the plan of sizes; or those of each.
    """

    num_samples: int
    batch_size: int | tuple[tuple[int, int], ...] | list[int]
    drop_last: bool
    is_padded: bool
    max_local_batch_size: int | None
    generations: list[tuple[int, int]]  # (world size, boundaries until the restart)


sizes = st.integers(1, 40)
size_plans = st.dictionaries(st.integers(1, 90), sizes, max_size=4)
settings = st.builds(
    Setting,
    num_samples=st.integers(1, 120),
    batch_size=sizes
    | st.builds(lambda first, rest: ((0, first), *rest.items()), sizes, size_plans)
    | st.lists(sizes, min_size=1, max_size=9),
    drop_last=st.booleans(),
    is_padded=st.booleans(),
    max_local_batch_size=st.none() | st.integers(1, 12),
    generations=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=5),
)


def batches_of(setting: Setting) -> Batches:
    if isinstance(setting.batch_size, list):
        sizes = setting.batch_size
        return ListedBatches(len(sizes), sizes.__getitem__)
    plan = ((0, setting.batch_size),)
    if isinstance(setting.batch_size, tuple):
        plan = tuple(sorted(setting.batch_size))
    return SizedBatches(plan, setting.num_samples, 0, setting.drop_last)


def num_samples_of(setting: Setting) -> int:
    is_listed = isinstance(setting.batch_size, list)
    return sum(setting.batch_size) if is_listed else setting.num_samples


def order_in(setting: Setting) -> Order:
    if not isinstance(setting.batch_size, list):
        return Permutation(setting.num_samples, KEY).take
    # What the batches hold: the samples one after another.
    starts = np.cumsum([0, *setting.batch_size])
    span = ListedBatches.span
    return lambda places: starts[places // span] + places % span


def plan_of(
    setting: Setting,
    *,
    rank: int,
    world_size: int,
    index: int = 0,
    order: Order | None = None,
    seeding: Seeding | None = None,
) -> LoopPlan:
    batches = batches_of(setting)
    shares = BatchSplit(
        rank, world_size, setting.max_local_batch_size, setting.is_padded
    )
    return LoopPlan(
        batches,
        EvenShares(batches, shares),
        order or order_in(setting),
        first=batches.number_at(index),
        end=len(batches),
        seeding=seeding,
    )


def batches_of_rank(plan: LoopPlan) -> list[list[MicroBatch]]:
    """Return the micro-batches of each global batch, all those that a loop walks."""
    asked = list(plan)
    in_flight = list(plan.in_flight)
    assert asked == [micro.indices for micro in in_flight if micro.indices]
    assert all((m.indices is NOTHING) == (m.part.num_read == 0) for m in in_flight)
    batches: list[list[MicroBatch]] = []
    for micro in in_flight:
        if not batches or batches[-1][0].number != micro.number:
            batches.append([])
        batches[-1].append(micro)
    return batches


def real_samples(ranks: Sequence[list[MicroBatch]]) -> list[int]:
    """Return the samples of one global batch, in their order."""
    return [
        index
        for micros in ranks
        for micro in micros
        for index in micro.indices[: micro.part.num_valid]
    ]


def uninterrupted(setting: Setting) -> list[list[int]]:
    whole = replace(setting, max_local_batch_size=None)
    plan = plan_of(whole, rank=0, world_size=1)
    return [real_samples([batch]) for batch in batches_of_rank(plan)]


def through_restarts(setting: Setting) -> list[list[int]]:
    """Deliver one loop over all ranks and generations; return its global batches."""
    delivered: list[list[int]] = []
    index = 0
    for world_size, num_boundaries in [*setting.generations, (1, 10**6)]:
        by_rank = [
            batches_of_rank(
                plan_of(setting, rank=rank, world_size=world_size, index=index)
            )
            for rank in range(world_size)
        ]
        assert len({len(batches) for batches in by_rank}) == 1
        for ranks in islice(zip(*by_rank, strict=True), num_boundaries):
            delivered.append(real_samples(ranks))
            index += ranks[0][0].part.advance
    return delivered


@given(setting=settings)
@example(Setting(10, 10, False, True, None, [(4, 0), (16, 1)]))
@example(Setting(3, 2, False, True, None, [(8, 1)]))
@example(Setting(10, 3, True, False, 1, [(4, 1), (1, 1), (3, 1), (2, 1)]))
def test_every_sample_is_delivered_once_at_any_world_sizes(setting: Setting) -> None:
    delivered = list(chain.from_iterable(through_restarts(setting)))
    everything = list(range(num_samples_of(setting)))
    in_order = order_in(setting)(np.array(everything)).tolist()
    if isinstance(setting.batch_size, list):
        assert delivered == everything
    elif setting.drop_last:
        batches = batches_of(setting)
        assert delivered == in_order[: batches.start(len(batches))]
        rest = setting.num_samples - len(delivered)
        assert rest < max(batches.size(len(batches) - 1), rest + 1)
    else:
        assert sorted(delivered) == everything


@given(setting=settings)
def test_global_batches_are_the_same_at_any_world_sizes(setting: Setting) -> None:
    assert through_restarts(setting) == uninterrupted(setting)


@given(setting=settings, world_size=st.integers(1, 20))
def test_padding_is_only_where_a_replica_has_nothing(
    setting: Setting, world_size: int
) -> None:
    by_rank = [
        batches_of_rank(plan_of(setting, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for ranks in zip(*by_rank, strict=True):
        for micro in (micro for micros in ranks for micro in micros):
            num_padding = len(micro.indices) - micro.part.num_valid
            assert num_padding == (setting.is_padded and micro.part.num_valid == 0)
        first_sample = ranks[0][0].indices[0]
        padding = {
            m.indices[0]
            for ms in ranks
            for m in ms
            if m.indices and not m.part.num_valid
        }
        assert padding <= {first_sample}


@given(setting=settings, world_size=st.integers(1, 20))
def test_padded_replicas_take_equally_many_steps(
    setting: Setting, world_size: int
) -> None:
    padded = replace(setting, is_padded=True)
    numbers = [
        [
            (micro.number, micro.part.micro, micro.part.is_step)
            for batch in batches_of_rank(
                plan_of(padded, rank=rank, world_size=world_size)
            )
            for micro in batch
        ]
        for rank in range(world_size)
    ]
    assert all(own == numbers[0] for own in numbers)


@given(setting=settings, world_size=st.integers(1, 20))
def test_what_a_micro_batch_says_of_its_batch_is_true(
    setting: Setting, world_size: int
) -> None:
    by_rank = [
        batches_of_rank(plan_of(setting, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for number, ranks in enumerate(zip(*by_rank, strict=True)):
        assert {micro.number for micros in ranks for micro in micros} == {number}
        size = len(real_samples(ranks))
        assert {
            micro.part.global_batch_size for micros in ranks for micro in micros
        } == {size}
        for micros in ranks:
            local_size = sum(micro.part.num_valid for micro in micros)
            assert {micro.part.local_batch_size for micro in micros} == {local_size}
            assert [micro.part.micro for micro in micros] == list(range(len(micros)))
            assert [micro.part.is_step for micro in micros] == [
                *[False] * (len(micros) - 1),
                True,
            ]
            if setting.max_local_batch_size is not None:
                assert all(
                    micro.part.num_valid <= setting.max_local_batch_size
                    for micro in micros
                )


@pytest.mark.parametrize("world_size", [4, 16])
def test_ten_samples_stay_ten(world_size: int) -> None:
    setting = Setting(10, 10, False, True, None, [])
    by_rank = [
        batches_of_rank(plan_of(setting, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    (ranks,) = zip(*by_rank, strict=True)
    assert sorted(real_samples(ranks)) == list(range(10))
    sizes = [len(micros[0].indices) for micros in ranks]
    assert sizes == ([3, 3, 2, 2] if world_size == 4 else [1] * 16)
    weights = [micros[0].part.num_valid for micros in ranks]
    assert sum(weights) == 10


def test_chunks_do_not_show() -> None:
    # 40,000 positions are computed in several chunks, from any batch on.
    setting = Setting(40_003, 7, False, True, None, [])
    whole = batches_of_rank(plan_of(setting, rank=1, world_size=3))
    assert len(whole) == 5715
    for first in (1, 1000, 4096, 5713, 5714):
        plan = plan_of(setting, rank=1, world_size=3, index=first * 7)
        assert batches_of_rank(plan) == whole[first:]


def test_a_finished_loop_has_nothing_left() -> None:
    setting = Setting(10, 4, False, True, None, [])
    plan = plan_of(setting, rank=0, world_size=2, index=10)
    assert batches_of_rank(plan) == []


@pytest.mark.parametrize("each_sample", [False, True])
def test_seeds_depend_on_the_position_in_the_order(each_sample: bool) -> None:
    plan = plan_of(
        Setting(10, 4, False, True, 1, []),
        rank=1,
        world_size=2,
        index=4,
        order=order_of_map(as_map(list(range(100, 110))), key=0),
        seeding=Seeding(KEY, each_sample),
    )
    assert list(plan) == [
        ([100 + p], [derive_seed(KEY, p)] if each_sample else derive_seed(KEY, p))
        for p in (6, 7, 9)
    ]


def test_resuming_far_into_a_long_order_computes_nothing_before() -> None:
    num_samples = 10**9
    setting = Setting(num_samples, 32, False, True, None, [])
    asked: list[int] = []
    order = Permutation(num_samples, KEY).take

    def counting(positions: np.ndarray) -> np.ndarray:
        asked.extend((int(positions.min()), positions.size))
        return order(positions)

    index = num_samples // 10 * 9
    tracemalloc.start()
    first = next(
        iter(plan_of(setting, rank=0, world_size=1, index=index, order=counting))
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 32
    assert asked == [index, 8192]
    assert peak < 4_000_000


@given(
    keys=st.lists(
        st.tuples(*[st.integers(0, 50)] * 3), min_size=2, max_size=2, unique=True
    )
)
def test_every_loop_has_an_order_of_its_own(keys: list[tuple[int, int, int]]) -> None:
    first, second = (
        Permutation(50, loop_key(*key)).take(np.arange(50)).tolist() for key in keys
    )
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
