"""Loops over streams of unknown lengths: what is in each batch, and what is refused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun import (
    AdaptiveDataLoader,
    CombinedLoader,
    ElasticRunError,
    Endless,
    Mixed,
    Packed,
    TextLines,
    Uncounted,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.data.order.batches import SizedBatches
from elasticrun.data.order.permutation import MAX_INDEX, Permutation
from elasticrun.data.order.plan import LoopPlan, RunningLoop, Seeding
from elasticrun.data.order.shares import BatchSplit, LaneShares
from elasticrun.data.streams.uncounted_batches import Delivery, all_batches
from elasticrun.data.workers.lanes import EXHAUSTED
from elasticrun.job.loop import NOTHING, MicroBatchInfo
from elasticrun.testing import read_trace
from tests.support.generations import generation, run_once
from tests.support.numbered_streams import LENGTHS, Unknown, flat

KEY = 5


@st.composite
def settings(draw: Any) -> dict[str, Any]:
    return {
        "lengths": draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)),
        "lanes": draw(st.integers(1, 5)),
        "window": draw(st.integers(1, 6)),
        "size": draw(st.integers(1, 9)),
        "max_local": draw(st.none() | st.integers(1, 4)),
        "is_shuffled": draw(st.booleans()),
        "is_padded": draw(st.booleans()),
    }


def slots_of(run: dict[str, Any]) -> tuple[int, list[int]]:
    """Return how many lanes there are, and how many samples each of them has."""
    num_lanes = min(run["lanes"], len(run["lengths"]))
    lengths = np.array(run["lengths"])
    if run["is_shuffled"]:
        lengths = lengths[Permutation(len(lengths), KEY).take(np.arange(len(lengths)))]
    return num_lanes, [int(lengths[n::num_lanes].sum()) for n in range(num_lanes)]


def owners_of(run: dict[str, Any], number: int, world_size: int) -> list[int]:
    """Return which replica, from 1 on, has a sample in each slot of a global batch."""
    num_lanes, totals = slots_of(run)
    slots = range(number * run["size"], (number + 1) * run["size"])
    owners = [slot % num_lanes % world_size + 1 for slot in slots]
    if num_lanes < world_size:  # Each replica has a run of neighbours.
        shares = [BatchSplit(r, world_size, None, True) for r in range(world_size)]
        owners = [
            r + 1
            for r in range(world_size)
            for _ in shares[r].even_share(len(slots), r)
        ]
    return [
        owner * (slot // num_lanes < totals[slot % num_lanes])
        for slot, owner in zip(slots, owners, strict=True)
    ]


Delivered = dict[int, list[tuple[MicroBatchInfo, list[int]]]]


def delivered(run: dict[str, Any], begin: int, rank: int, world_size: int) -> Delivered:
    """Return what a replica delivers of each global batch from one on."""
    streams = Uncounted(
        Unknown(*run["lengths"], lanes=run["lanes"], window=run["window"])
    ).apart(is_shuffled=run["is_shuffled"])
    lanes = streams.lanes
    batches = SizedBatches(((0, run["size"]),), MAX_INDEX)
    shares = BatchSplit(rank, world_size, run["max_local"], run["is_padded"])
    first = begin // run["size"]
    plan = LoopPlan(
        batches,
        LaneShares(batches, shares, None, lanes),
        lanes,
        first=first,
        end=len(batches),
        seeding=Seeding(0, True),
        names_lanes=True,
        asks_for_nothing=True,
    )

    def read() -> Iterator[tuple[list[int], list[int]]]:
        for indices, _, _ in plan:
            samples = streams.__getitems__([n + KEY * MAX_INDEX for n in indices])
            slots = [at for at, sample in enumerate(samples) if sample is not EXHAUSTED]
            yield slots, [samples[slot] for slot in slots]

    numbers = count(first)

    def sums_of(own: list[int]) -> Callable[[], list[int]]:
        owners = owners_of(run, next(numbers), world_size)
        assert own == [owners.count(rank + 1)]
        return lambda: [sum(map(bool, owners))]

    loop = RunningLoop(batches=batches, begin=first)
    how = Delivery(shares, lanes.num_lanes, lambda: [-1], sums_of)
    found: Delivered = {}
    for batch in all_batches(loop, plan.in_flight, read(), how):
        _, indices, part, places = loop.current
        own = [] if batch is NOTHING else batch[: part.num_valid]
        assert len(own) == part.num_valid == len(indices) == len(places)
        is_padding = run["is_padded"] and part.global_batch_size
        assert batch == (own or ([-1] if is_padding else NOTHING))
        assert part.num_valid <= (run["max_local"] or MAX_INDEX)
        found.setdefault(loop.current.number, []).append((part, own))
    return found


@given(run=settings(), worlds=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_batches_are_the_same_at_any_number_of_replicas(
    run: dict[str, Any], worlds: list[int]
) -> None:
    expected = sum(run["lengths"])
    if not expected:
        return  # Which is an error.
    alone = delivered(run, 0, 0, 1)
    whole = {at: flat_of(own) for at, own in alone.items()}
    samples = [sample for own in whole.values() for sample in own]
    assert sorted(samples) == list(range(expected))
    assert list(whole) == list(range(len(whole)))
    advances = [own[0][0].advance for own in alone.values()]
    begins = [0, *accumulate(advances)]  # The slot with which each batch begins.
    at = 0
    for world_size in worlds:
        begin = begins[at]
        ranks = [delivered(run, begin, rank, world_size) for rank in range(world_size)]
        for number in list(whole)[at:]:
            own = [rank[number] for rank in ranks]
            assert sorted(s for each in own for s in flat_of(each)) == sorted(
                whole[number]
            )
            weights = [part.weight for each in own for part, _ in each]
            assert sum(weights) == pytest.approx(world_size if whole[number] else 0)
            sizes = {part.global_batch_size for each in own for part, _ in each}
            assert sizes == {len(whole[number])}
            if run["is_padded"] and whole[number]:
                assert len({len(each) for each in own}) == 1
            assert [part.is_step for part, _ in own[0]].index(True) == len(own[0]) - 1
            assert {part.advance for each in own for part, _ in each} == {
                alone[number][0][0].advance
            }
        assert all({*rank} <= {*list(whole)[at:]} for rank in ranks)
        at = (at + len(whole)) // 2


def flat_of(parts: list[tuple[MicroBatchInfo, list[int]]]) -> list[int]:
    return [sample for _, own in parts for sample in own]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"max_local_batch_size": 3}]
)
def test_a_loop_goes_on_with_and_without_learned_lengths(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def script(stop_in: int = -1) -> list[tuple[int, list[int]]]:
        streams = Unknown(*LENGTHS, lanes=3, window=5)
        loader = AdaptiveDataLoader(streams, **{"batch_size": 8, **options})
        for epoch in remaining_epochs_until(2):
            for batch in loader:
                found.append((epoch, batch.tolist()[: loader.num_valid]))
                if len(found) == stop_in:
                    request_stop()
        return found

    found: list[tuple[int, list[int]]] = []
    calm = run_once(script)
    for epoch in (0, 1):
        samples = [sample for at, batch in calm if at == epoch for sample in batch]
        assert len(set(samples)) == len(samples) == 90
    for stop_in in {1, len(calm) // 2, len(calm) // 2 + 1, len(calm) - 1}:
        for is_kept in (False, True):
            found = []
            directory = tmp_path / f"{stop_in}{is_kept}"
            assert run_once(lambda at=stop_in: script(at), directory) is None
            shutil.rmtree(directory / "streams", ignore_errors=not is_kept)
            assert run_once(script, directory) == calm


def test_a_resume_with_learned_lengths_opens_the_stream_it_is_in(
    tmp_path: Path,
) -> None:
    def script(stop_in: int) -> list[tuple[int, int]]:
        streams = Unknown(*[20] * 8, lanes=2, window=5)
        for number, _ in enumerate(AdaptiveDataLoader(streams, 8), 1):
            if number == stop_in:
                request_stop()
        return streams.opened

    run_once(lambda: script(17), tmp_path)  # Each lane's fourth stream has begun.
    opened = run_once(lambda: script(-1), tmp_path)
    assert opened == [(6, 0), (7, 0)]


def drawing(number: int) -> int:
    return number + random.randrange(1000)


@pytest.mark.parametrize("collate", [None, list])
def test_workers_deliver_what_one_process_does(collate: Any, tmp_path: Path) -> None:
    def script(num_workers: int) -> list[Any]:
        streams = Unknown(*LENGTHS, lanes=3, window=5, transform=drawing)
        loader = AdaptiveDataLoader(
            streams,
            8,
            True,
            num_workers=num_workers,
            max_local_batch_size=3,
            collate_fn=collate,
        )
        state = random.getstate()
        found = [list(map(int, batch)) for batch in loader]
        assert random.getstate() == state
        return found

    assert run_once(lambda: script(2)) == run_once(lambda: script(0))


def test_a_replica_without_samples_gets_padding(job: Any) -> None:
    streams = Uncounted(Unknown(0, 3, transform=lambda n: n + 7))
    assert [streams.padding(), streams.padding()] == [7, 7]


def test_lines_of_unknown_number_are_looped_over(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 5)
    (tmp_path / "b").write_text("yy\n" * 3)
    lines = TextLines(tmp_path / "[ab]", lengths="unknown")
    assert list(AdaptiveDataLoader(lines, 3)) == [
        ["x", "yy", "x"],
        ["yy", "x", "yy"],
        ["x", "x"],
    ]
    sequences = Packed(lines, lambda line: list(line.encode()), 2)
    batches = [batch["tokens"].shape[0] for batch in AdaptiveDataLoader(sequences, 9)]
    assert batches == [5]
    lines = TextLines(tmp_path / "[ab]", parse=int, lengths="unknown")
    with pytest.raises(ElasticRunError, match="sample 0 of lane 0: int raised Value"):
        list(AdaptiveDataLoader(lines, 3))


def test_a_trace_names_lanes(tmp_path: Path) -> None:
    def script() -> None:
        for _ in AdaptiveDataLoader(Unknown(2, 1), 3):
            pass

    run_once(script, tmp_path / "job", trace_dir=str(tmp_path / "trace"))
    [first] = read_trace(tmp_path / "trace")
    assert first["streams"] == [["lane 0", 0], ["lane 1", 0], ["lane 0", 1]]
    assert first["indices"] == first["places"] == [0, 1, 2]


def test_no_sample_at_all_is_an_error(job: Any) -> None:
    with pytest.raises(ElasticRunError, match="no stream has a sample"):
        list(AdaptiveDataLoader(Unknown(0, 0), 4))


def test_what_needs_lengths_is_refused(job: Any) -> None:
    streams = Unknown(3, 4)
    loader = AdaptiveDataLoader(streams, 2)
    assert loader.num_samples == 0
    needs = "needs to know how many samples there are, and Unknown"
    for use in (
        lambda: len(loader),
        lambda: loader.batches(3),
        lambda: next(loader.read(0)),
        lambda: loader.autoscale(8),
        lambda: CombinedLoader([loader]),
        lambda: AdaptiveDataLoader(streams, {0: 2, 4: 3}),
        lambda: AdaptiveDataLoader(streams, 2, drop_last=True),
        lambda: AdaptiveDataLoader(Mixed({"a": Uncounted(streams)}, {"a": 1}), 2),
    ):
        with pytest.raises(TypeError, match=needs):
            use()
    with pytest.raises(TypeError, match='was given lengths="unknown"'):
        AdaptiveDataLoader(Mixed({"a": streams}, {"a": 1}), 2)
    with pytest.raises(TypeError, match="streams that have an end, not Endless"):
        Uncounted(Endless(streams))
    with pytest.raises(TypeError, match="takes no streams with skip_broken"):
        Uncounted(TextLines(__file__, parse=int, skip_broken=True))


def test_a_loop_in_the_body_of_another_one(job: Any) -> None:
    with generation():
        outer = AdaptiveDataLoader(Unknown(5, 4), 4)
        inner = AdaptiveDataLoader(Unknown(3), 2, True)
        for _ in outer:
            assert sorted(flat(inner)) == [0, 1, 2]
