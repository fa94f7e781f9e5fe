"""Batches and orders of one's own, ready-made ones, and sizes by plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    LengthGroups,
    WeightedDraws,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.data.order.shares import BatchSplit
from tests.support.data import Numbers
from tests.support.generations import generation, run_once

pytestmark = pytest.mark.usefixtures("job")

LISTS = [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9, 8]]


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "given",
    [LISTS, [np.array(own) for own in LISTS], [torch.tensor(own) for own in LISTS]],
    ids=["lists", "arrays", "tensors"],
)
def test_batches_are_those_of_the_map(given: Any) -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_sampler=given, name="own")
    assert (len(loader), loader.batch_size) == (4, None)
    assert lists(loader) == LISTS


def test_each_batch_of_the_map_is_made_once() -> None:
    asked: list[int] = []

    class Counting(list[list[int]]):
        def __getitem__(self, number: Any) -> Any:
            asked.append(number)
            return super().__getitem__(number)

    loader = AdaptiveDataLoader(Numbers(10), batch_sampler=Counting(LISTS))
    asked.clear()
    assert lists(loader) == LISTS
    assert lists(loader.batches(6)) == [*LISTS, *LISTS[:2]]
    assert asked == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_every_replica_gets_its_share_of_each_batch() -> None:
    ranks = []
    for rank in range(2):
        with generation():
            loader = AdaptiveDataLoader(
                Numbers(10), batch_sampler=LISTS, max_local_batch_size=2
            )
            loader.shares = BatchSplit(rank, 2, 2, is_padded=True)
            ranks.append([(batch.tolist(), loader.loss_weight) for batch in loader])
    assert ranks[0] == [
        ([0, 1], 0.8), ([2], 0.4), ([5], 2.0), ([6], 1.0), ([8, 9], 4 / 3)
    ]  # fmt: skip
    assert ranks[1] == [
        ([3], 0.4), ([4], 0.4), ([5], 0.0), ([7], 1.0), ([8], 2 / 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("empty", "num_workers", "is_counted"),
    [([], 0, True), (torch.tensor([]), 0, False), (np.array([]), 1, False)],
)
def test_an_empty_batch_is_a_step_of_padding(
    empty: Any, num_workers: int, is_counted: bool, tmp_path: Any
) -> None:
    def script(stop_in: int | None) -> None:
        net = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
        loader = AdaptiveDataLoader(
            Numbers(9),
            batch_sampler=[empty, [5, 6, 7], empty, [8]],
            num_workers=num_workers,
            max_local_batch_size=2,
        )
        for batch in loader:
            optimizer.zero_grad()
            mean = model(batch[:, None].double()).mean()
            if is_counted:
                mean = model.weigh(mean, count=loader.num_valid)
            (mean / (loader.num_valid > 0)).backward()  # Infinite for nothing.
            if loader.is_step:
                assert net.weight.grad is not None
                has_gradients = bool(net.weight.grad.any())
                assert has_gradients == (loader.global_batch_size > 0)
            optimizer.step()
            delivered.append((loader.batch_index, loader.num_valid, batch.tolist()))
            assert loader.loss_weight >= 0
            if loader.batch_index == stop_in:
                request_stop()

    expected = [(0, 0, [0]), (1, 2, [5, 6]), (1, 1, [7]), (2, 0, [0]), (3, 1, [8])]
    for stop_in in range(4):
        delivered: list[tuple[int, int, list[int]]] = []
        run_once(lambda: script(stop_in), tmp_path / str(stop_in))  # noqa: B023
        run_once(lambda: script(None), tmp_path / str(stop_in))
        assert delivered == expected


def test_an_empty_batch_is_nothing_where_there_is_no_padding() -> None:
    loader = AdaptiveDataLoader(
        Numbers(4), batch_sampler=[[0], [], [2]], even_batches=False
    )
    assert [(index, *batch.tolist()) for index, batch in loader.enumerate()] == [
        (0, 0),
        (2, 2),
    ]


def test_shuffled_batches_come_once_in_each_loop_in_another_order() -> None:
    many = [[number, number] for number in range(20)]
    loader = AdaptiveDataLoader(Numbers(20), batch_sampler=many, shuffle=True)
    orders = [lists(loader) for _ in range(2)]
    orders.append(lists(loader.batches(20)))
    orders.append(lists(loader.batches(20)))
    assert all(sorted(order) == many for order in orders)
    assert len({str(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_sampler": []}, ValueError, "the batch sampler .* is empty"),
        ({"batch_sampler": [0, 1]}, TypeError, "batch 0 .* is 0, but .* sampler="),
        ({"batch_sampler": 5}, TypeError, "batch_sampler=int has no length, or cannot"),
        ({"batch_sampler": LISTS, "batch_size": 2}, ValueError, "excludes batch_size"),
        ({"batch_sampler": LISTS, "drop_last": True}, ValueError, "excludes"),
        ({"batch_size": {5: 2}}, ValueError, "beginning with 0"),
        ({"batch_size": {0: 0}}, ValueError, r"batch_size\[0\]=0 must be a whole"),
        ({"batch_size": {0: 2, 1.5: 3}}, ValueError, "a plan maps numbers"),
        ({"batch_size": lambda seen: 2}, ValueError, "is a function.*: a plan maps"),
    ],
)
def test_what_gives_no_batches_is_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        lists(AdaptiveDataLoader(Numbers(4), **options))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda data: {"sampler": WeightedRandomSampler([0.5, 1], 7)},
            r"sampler=WeightedDraws\(weights, num_samples=7, replacement=True\)",
        ),
        (
            lambda data: {"sampler": SubsetRandomSampler([1, 3])},
            r"AdaptiveDataLoader\(Subset\(dataset, indices\), \.\.\., shuffle=True\)",
        ),
        (lambda data: {"sampler": RandomSampler(data)}, "shuffle=True"),
        (lambda data: {"sampler": SequentialSampler(data)}, "neither sampler nor"),
        (lambda data: {"sampler": DistributedSampler(data, 2, 0)}, "shuffle=True"),
        (
            lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 3, True)},
            r"batch_size=3, drop_last=True",
        ),
    ],
)
def test_torchs_samplers_are_refused_with_the_line_to_write(
    make: Callable[[Any], dict[str, Any]], line: str
) -> None:
    data = Numbers(4)
    with pytest.raises(TypeError, match=f"Write instead: .*{line}"):
        AdaptiveDataLoader(data, **make(data))


class Backwards:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 100_000

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        self.asked.append(positions.size)
        return 99_999 - positions


def test_an_order_is_taken_by_arrays() -> None:
    order = Backwards()
    loader = AdaptiveDataLoader(Numbers(100_000), 50, sampler=order)
    assert next(iter(loader)).tolist() == list(range(99_999, 99_949, -1))
    assert order.asked == [1000, 8150]  # Its checksum, and one chunk.


def test_an_order_that_returns_no_indices_is_refused() -> None:
    class Wrong(Backwards):
        def take(self, positions: NDArray[np.int64]) -> NDArray[Any]:
            return positions / 2

    with pytest.raises(
        TypeError, match="take.. of sampler=Wrong returned ndarray of f"
    ):
        AdaptiveDataLoader(Numbers(100_000), 50, sampler=Wrong())


def test_a_ready_made_order_is_another_one_in_each_loop() -> None:
    loader = AdaptiveDataLoader(
        Numbers(30), 5, sampler=LengthGroups(np.arange(30) % 7, 5, window=2)
    )
    orders = [lists(loader), lists(loader), lists(loader.batches(6))]
    flat = [[sample for batch in order for sample in batch] for order in orders]
    assert all(sorted(order) == list(range(30)) for order in flat)
    assert len({str(order) for order in flat}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"sampler": WeightedDraws([1, 2, 9], 100)},
        {"batch_sampler": [[0, 1], [1, 2]]},
        {"batch_size": {0: 1, 2: 3}},
    ],
    ids=["weights", "lists", "plan"],
)
def test_another_order_than_the_checkpoints_is_refused(
    changed: dict[str, Any], tmp_path: Any
) -> None:
    first: dict[str, dict[str, Any]] = {
        "sampler": {"sampler": WeightedDraws([1, 2, 3], 100)},
        "batch_sampler": {"batch_sampler": [[0, 1], [2]]},
        "batch_size": {"batch_size": {0: 1, 2: 2}},
    }

    def script(options: dict[str, Any]) -> None:
        loader = AdaptiveDataLoader(Numbers(3), name="train", **options)
        for _ in remaining_epochs_until(1):
            lists(loader)

    run_once(lambda: script(first[next(iter(changed))]), tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint's loader `train` had"):
        run_once(lambda: script(changed), tmp_path)


def test_sizes_follow_the_plan_over_epochs_and_passes() -> None:
    plan = {0: 2, 3: 4, 25: 5}
    loader = AdaptiveDataLoader(Numbers(10), plan, shuffle=True)
    sizes, lengths = [], []
    for _ in remaining_epochs_until(3):
        lengths.append(len(loader))
        sizes.append([len(batch) for batch in loader])
    # Samples 25 and on are in the third epoch, whose first 8 come in fours.
    assert sizes == [[2, 2, 4, 2], [4, 4, 2], [4, 4, 2]]
    assert lengths == [4, 3, 3]
    assert [len(batch) for batch in loader.batches(8)] == [2, 2, 4, 4, 4, 4, 4, 4]
    assert [len(batch) for batch in loader.batches(2)] == [5, 5]
    assert loader.finished_batches == 10


def test_dropping_in_passes_of_planned_sizes_is_refused() -> None:
    loader = AdaptiveDataLoader(Numbers(10), {0: 2, 4: 3}, drop_last=True)
    assert [len(batch) for batch in loader] == [2, 2, 3, 3]
    with pytest.raises(ValueError, match="the end of each pass would depend on all"):
        loader.batches(2)
