"""What a loss is a mean over; what weighing tells other replicas, and waits for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ElasticRunError,
)
from elasticrun.job.current import current_job
from elasticrun.parallel.weighing import Weighing
from tests.parallel.training import backward, linear, loader
from tests.support.data import Numbers

pytestmark = pytest.mark.usefixtures("job")


class Sum:
    """One of a number, over this replica and one that gives as much."""

    def __init__(self, own: Tensor, *, async_op: bool) -> None:
        assert async_op
        assert own.numel() == 1
        self.own = own
        self.is_awaited = False

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.is_awaited = True
        self.own *= 2


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Sum]:
    """Return a list that gets what is sent."""
    sent: list[Sum] = []

    def all_reduce(own: Tensor, *, group: object, async_op: bool) -> Sum:
        assert group == "of its own"
        sent.append(Sum(own, async_op=async_op))
        return sent[-1]

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: "of its own")
    return sent


@pytest.mark.parametrize("size", [None, 2])
def test_a_count_is_one_number_a_step_that_the_backward_pass_waits_for(
    sums: list[Sum], size: int | None
) -> None:
    weighing = Weighing(2, current_job().in_step)
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
    weighing = Weighing(2, current_job().in_step)
    weight = torch.ones((), requires_grad=True)
    for _ in AdaptiveDataLoader(Numbers(8), 4, max_local_batch_size=2):
        for reduction in ("mean", "sum"):
            weighing.weigh(weight * 1, None, reduction, None).backward()
    assert sums == []


def test_different_counts_in_one_cut_batch_are_refused() -> None:
    net = linear(1.0)
    model = AdaptiveDataParallel(net)
    for size, is_refused in [(None, False), (2, True)]:
        with (
            pytest.raises(ElasticRunError, match="means over different counts")
            if (is_refused)
            else contextlib.nullcontext()
        ):
            for batch in loader(size):
                output = model(batch[:, None].float())
                over_two = model.weigh(output.mean(), 2)
                (over_two + model.weigh(output.sum(), 3)).backward()


def test_a_count_that_the_last_micro_batch_lacks_is_refused() -> None:
    model = AdaptiveDataParallel(linear(1.0))
    batches = iter(loader(2))
    model.weigh(model(next(batches)[:, None].float()).mean(), 2).backward()
    batch = next(batches)
    with pytest.raises(ElasticRunError, match="but not in the last"):
        backward(model, batch)
    assert next(batches) is not None


def test_a_count_is_of_its_global_batch_alone() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    numbers = loader(2, size=12)
    for is_left in [True, False]:
        for number, batch in numbers.enumerate():
            model.zero_grad()
            loss = model(batch[:, None].float()).mean()
            if number == (0 if is_left else 1):
                loss = model.weigh(loss, 3)
            loss.backward()
            if is_left:
                break
    assert net.weight.grad == 9.5


def test_counts_count_where_the_last_micro_batch_has_no_backward_pass() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    numbers = loader(2, size=4)
    for batch in numbers:
        loss = model.weigh(model(batch[:, None].float()).mean(), 3)
        if not numbers.is_step:
            loss.backward()
        optimizer.step()
    assert net.weight == -0.5 * 3 / (3 + 3)


def test_what_is_weighed_is_checked() -> None:
    model = AdaptiveDataParallel(linear(1.0))
    loss = model(torch.ones(1, 1)).mean()
    with pytest.raises(ValueError, match="reduction='none' is neither"):
        model.weigh(loss, reduction="none")
    with pytest.raises(TypeError, match="got a count for a loss with reduction='sum'"):
        model.weigh(loss, 3, reduction="sum")
    assert model.weigh(loss.detach(), 3) == loss


def test_a_pass_that_failed_leaves_nothing_weighed() -> None:
    net = linear(1.0)
    model = AdaptiveDataParallel(net)
    for batch in loader(2, size=4):
        output = model(batch[:, None].float())
        output.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model.weigh(output.mean()).backward()
        net.zero_grad()
        backward(model, batch)
    assert net.weight.grad == 1.5
