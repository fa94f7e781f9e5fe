"""Lanes: every sample once, by its lane, at any number of replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.data.order.batches import Passes, SizedBatches
from elasticrun.data.order.lanes import Blocks, Lanes
from elasticrun.data.order.permutation import MAX_INDEX
from elasticrun.data.order.plan import LoopPlan
from elasticrun.data.order.shares import BatchSplit, LaneShares
from tests.support.mixing import mixing

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def lanes_of(
    lengths: list[int], num: int, window: int, block: int | None, *, are_entered: bool
) -> Lanes:
    """Return lanes of streams that are cut into blocks of so many samples, or whole."""
    blocks = None
    if block is not None:
        begins = [
            begin + at
            for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False)
            for at in range(0, length, block)
        ]
        blocks = Blocks(np.array(begins), np.full(len(begins), are_entered))
    return Lanes(np.array(lengths), num, window=window, blocks=blocks)


any_lanes = st.builds(
    lanes_of,
    lengths,
    st.integers(1, 9),
    st.integers(1, 60),
    st.none() | st.integers(1, 30),
    are_entered=st.booleans(),
)
keys = st.none() | st.integers(0, 5)


def everywhere(lanes: Any) -> Any:
    return np.arange(len(lanes))


@given(any_lanes, keys)
def test_an_order_has_each_sample_once_wherever_it_is_entered(
    lanes: Lanes, key: int | None
) -> None:
    order = lanes.order(key)
    whole = order(everywhere(lanes))
    assert sorted(whole) == list(range(len(lanes)))
    for begin in {0, len(lanes) // 2, len(lanes) - 1}:
        entered = lanes.order(key)(np.arange(begin, len(lanes)))
        assert entered.tolist() == whole[begin:].tolist()


@given(any_lanes, keys)
def test_all_samples_of_a_block_are_in_one_lane(lanes: Lanes, key: int | None) -> None:
    order = lanes.order(key)
    samples, found = order(everywhere(lanes)), order.lane_of(everywhere(lanes))
    assert set(found) == set(range(order.num_lanes))
    begins = lanes.starts
    if key is not None and lanes.blocks is not None:
        begins = lanes.blocks.begins
    blocks = np.searchsorted(begins, samples, side="right") - 1
    assert len({*zip(blocks.tolist(), found.tolist(), strict=True)}) == len({*blocks})
    if lanes.blocks is None:  # Then a stream has its lane for good.
        assert found.tolist() == lanes.lane_of_stream[blocks].tolist()


@given(any_lanes, keys)
def test_a_round_takes_one_sample_of_each_lane_that_has_one(
    lanes: Lanes, key: int | None
) -> None:
    order = lanes.order(key)
    found, numbers = order.locate(everywhere(lanes))
    places = found[: order.num_lanes].tolist()  # All lanes have a sample.
    assert key is not None or places == sorted(places)
    rounds = [
        (number, lane)
        for number in range(order.totals.max())
        for lane in places
        if number < order.totals[lane]
    ]
    assert list(zip(numbers, found, strict=True)) == rounds


@given(any_lanes, st.integers(0, 5))
def test_no_sample_leaves_its_window(lanes: Lanes, key: int) -> None:
    """So nobody keeps more than a window of samples that were passed over."""
    order = lanes.order(key)
    found, numbers = order.locate(everywhere(lanes))
    shuffled = order._shuffled(found, numbers)
    into = order._into_window[found]
    same = (shuffled + into) // lanes.window == (numbers + into) // lanes.window
    assert same.all()


@given(any_lanes, keys, st.integers(1, 20), st.data())
def test_batches_alike_have_like_lanes(
    lanes: Lanes, key: int | None, size: int, data: Any
) -> None:
    position = data.draw(st.integers(0, len(lanes) - 1))
    order = lanes.order(key)
    count = order.num_alike(position, size)
    if count > 1:
        found = order.lane_of(np.arange(position, position + count * size))
        assert (found.reshape(count, size) == found[:size]).all()


def test_longest_streams_are_dealt_first() -> None:
    lanes = Lanes(np.array([5, 50, 20, 10, 10, 5]), 2, window=1)
    assert lanes.lane_of_stream.tolist() == [1, 0, 1, 1, 1, 1]
    assert lanes.order(None).totals.tolist() == [50, 50]


@given(any_lanes, st.integers(0, 5))
def test_lanes_of_blocks_differ_by_the_longest_one_at_most(
    lanes: Lanes, key: int
) -> None:
    if lanes.blocks is not None:
        longest = np.diff(lanes.blocks.begins, append=len(lanes)).max()
        totals = lanes.order(key).totals
        assert totals.max() - totals.min() <= longest


def test_orders_differ_by_key_and_windows_mix() -> None:
    lanes = lanes_of([1000] * 8, 4, 400, 250, are_entered=True)
    first, other = (lanes.order(key)(everywhere(lanes)) for key in (1, 2))
    assert (first == other).mean() < 0.01
    assert (np.diff(first[::4]) == 1).mean() < 0.05  # One lane's samples.


@pytest.mark.parametrize(
    ("num_files", "length", "batch_size", "window", "block", "least_met"),
    [
        (64, 1500, 16, 16_384, 256, 0.9),
        (64, 500, 16, 1118, 72, 0.9),  # As of pictures of 30 and 100 kB.
        (256, 500, 32, 335, 24, 0.9),
        (256, 500, 32, 16_384, 256, 0.9),
        (1000, 60, 32, 16_384, 256, 0.5),  # Files shorter than a window.
        (1, 50_000, 32, 16_384, 256, 1),
    ],
)
def test_files_mix(
    num_files: int,
    length: int,
    batch_size: int,
    window: int,
    block: int,
    least_met: float,
) -> None:
    lanes = lanes_of([length] * num_files, 64, window, block, are_entered=True)
    orders = [lanes.order(key)(everywhere(lanes)) for key in range(3)]
    met, correlation, again = mixing(orders, num_files, batch_size)
    assert met >= least_met
    assert correlation <= 0.12
    assert again <= 1.2


@pytest.mark.parametrize("batch_size", [32, 64])
def test_shares_at_64_lanes_are_nearly_even(batch_size: int) -> None:
    """With a batch of as many samples: the largest share over the mean one."""
    order = Lanes(np.full(64, 100), 64, window=1).order(None)
    for world_size in (3, 5, 7):
        owners = order.lane_of(np.arange(64)) % world_size
        assert np.bincount(owners).max() / (64 / world_size) <= 1.1


@st.composite
def runs(draw: Any) -> dict[str, Any]:
    return {
        "lanes": draw(any_lanes),
        "batch_size": draw(st.integers(1, 20)),
        "max_local": draw(st.none() | st.integers(1, 6)),
        "is_padded": draw(st.booleans()),
        "is_endless": draw(st.booleans()),
        "num_virtual": draw(st.none() | st.integers(6, 8)),
        "generations": draw(
            st.lists(
                st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4
            )
        ),
    }


def plan_of(run: dict[str, Any], rank: int, world_size: int, first: int) -> LoopPlan:
    lanes: Lanes = run["lanes"]
    batches = SizedBatches(
        ((0, run["batch_size"]),), MAX_INDEX if run["is_endless"] else len(lanes)
    )
    passes = Passes(len(lanes), lanes.order)
    shares = BatchSplit(
        rank, world_size, run["max_local"], run["is_padded"], run["num_virtual"]
    )
    end = first + 12 if run["is_endless"] else len(batches)
    return LoopPlan(
        batches,
        LaneShares(batches, shares, None, passes),
        passes,
        first=first,
        end=end,
    )


@pytest.mark.slow(20)
@given(runs())
def test_batches_are_the_same_at_any_number_of_replicas(run: dict[str, Any]) -> None:
    """P1, P2 and P4: over restarts with other world sizes."""
    lanes: Lanes = run["lanes"]
    first = 0
    for world_size, num_batches in run["generations"]:
        plans = [plan_of(run, rank, world_size, first) for rank in range(world_size)]
        asked = [list(plan) for plan in plans]
        assert asked == [
            [indices for _, indices, part, _ in plan.in_flight if part.num_read]
            for plan in plans
        ]
        counts = {
            tuple((number, part.is_step) for number, _, part, _ in plan.in_flight)
            for plan in plans
        }
        if run["num_virtual"] is None and run["is_padded"]:
            assert len(counts) == 1
        if run["num_virtual"] is not None:
            calm = plan_of(run, 0, 1, first)
            list(calm)
            assert shares_of(plans) == shares_of([calm])
        for number in range(first, min(first + num_batches, plans[0].end)):
            check_batch(run, plans, number, lanes)
        first = min(first + num_batches, plans[0].end)


def shares_of(plans: list[LoopPlan]) -> set[Any]:
    """Return each micro-batch with samples, and of which virtual replica it is."""
    return {
        (number, part.share, tuple(places), part.weight)
        for plan in plans
        for number, _, part, places in plan.in_flight
        if part.num_valid
    }


def check_batch(
    run: dict[str, Any], plans: list[LoopPlan], number: int, lanes: Lanes
) -> None:
    start, size = plans[0].batches.start(number), plans[0].batches.size(number)
    expected = plans[0].order(np.arange(start, start + size)).tolist()
    delivered: list[tuple[int, int]] = []  # Each sample with its place.
    weight = 0.0
    for rank, plan in enumerate(plans):
        micros = [each for each in plan.in_flight if each[0] == number]
        own = [i for _, indices, p, _ in micros for i in indices[: p.num_valid]]
        places = [at for *_, p, places in micros for at in places[: p.num_valid]]
        num_shares = run["num_virtual"] or len(plans)
        if lanes.num_lanes >= num_shares:
            found = plan.order.lane_of(start + np.array(places, int))  # type: ignore[attr-defined]
            owned = BatchSplit(rank, len(plans), None, True, num_shares).owned
            assert set(found % num_shares) <= {*owned}
        delivered += zip(places, own, strict=True)
        weight += sum(part.weight for _, _, part, _ in micros) / num_shares
        assert all(len(p) <= (run["max_local"] or size) for _, p, _, _ in micros)
        assert [part.is_step for _, _, part, _ in micros][-1]
    assert sorted(delivered) == list(enumerate(expected))
    assert weight == pytest.approx(1)
