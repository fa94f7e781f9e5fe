"""What weighing sends to other replicas, and when it waits for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elasticrun import AdaptiveDataLoader
from elasticrun.parallel.weighing import Weighing
from tests.support.data import Numbers

pytestmark = pytest.mark.usefixtures("job")


class Sum:
    """One of a number, over this replica and one that gives as much."""

    def __init__(self, own: Tensor, *, async_op: bool) -> None:
        assert async_op
        assert own.numel() == 1
        self.own = own
        self.is_awaited = False

    def wait(self) -> None:
        self.is_awaited = True
        self.own *= 2


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Sum]:
    """Return a list that gets what is sent."""
    sent: list[Sum] = []

    def all_reduce(own: Tensor, *, async_op: bool) -> Sum:
        sent.append(Sum(own, async_op=async_op))
        return sent[-1]

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sent


@pytest.mark.parametrize("size", [None, 2])
def test_a_count_is_one_number_a_step_that_the_backward_pass_waits_for(
    sums: list[Sum], size: int | None
) -> None:
    weighing = Weighing(2)
    loader = AdaptiveDataLoader(Numbers(8), 4, max_local_batch_size=size)
    weight = torch.ones((), requires_grad=True)
    num_micro_batches = 1 if size is None else 2
    for _ in loader:
        weight.grad = None
        loss = weighing.weigh(weight * 1, 3, "mean", None)
        assert len(sums) == loader.batch_index + loader.is_step
        assert not (loader.is_step and sums[-1].is_awaited)
        loss.backward()
        assert all(each.is_awaited for each in sums)
        if loader.is_step:  # Three over the mean of two replicas' sums.
            assert weight.grad == 3 / (3 * num_micro_batches)


def test_what_is_weighed_without_a_count_sends_nothing(sums: list[Sum]) -> None:
    weighing = Weighing(2)
    weight = torch.ones((), requires_grad=True)
    for _ in AdaptiveDataLoader(Numbers(8), 4, max_local_batch_size=2):
        for reduction in ("mean", "sum"):
            weighing.weigh(weight * 1, None, reduction, None).backward()
    assert sums == []
