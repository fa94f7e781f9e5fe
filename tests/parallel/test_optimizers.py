"""No stop loses what several optimizers wait for, or what one has got later."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ElasticRunError,
    finished_epochs,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.parallel.arguments import check_closures
from tests.support.data import Numbers
from tests.support.generations import run_once

NUM_BATCHES = 9


def train(*, rates: tuple[int, ...], stop_in: int | None = None) -> list[Tensor]:
    """Step each optimizer after every so many batches, with the gradients of all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizers = [
        torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for layer in (net[0], net[2])
    ]
    model = AdaptiveDataParallel(net, optimizers)
    loader = AdaptiveDataLoader(Numbers(2 * NUM_BATCHES), 2)
    for _ in remaining_epochs_until(1):
        for number, x in loader.enumerate():
            if number == stop_in:
                request_stop()
            model(x[:, None] / 10).square().mean().backward()
            for rate, optimizer in zip(rates, optimizers, strict=True):
                if number % rate == rate - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("rates", [(1, 2), (3, 1), (2, 3)])
def test_a_stop_loses_no_gradients_of_the_slower_one(
    tmp_path: Path, rates: tuple[int, ...]
) -> None:
    calm = run_once(lambda: train(rates=rates), tmp_path / "calm")
    num_stopped = 0
    for stop_in in range(1, NUM_BATCHES):
        directory = tmp_path / str(stop_in)
        first = run_once(
            lambda stop=stop_in: train(rates=rates, stop_in=stop), directory
        )
        num_stopped += first is None
        again = run_once(lambda: train(rates=rates), directory)
        torch.testing.assert_close(again, calm, rtol=0, atol=0)
    assert num_stopped >= 5


@pytest.mark.parametrize("zeroed_by", ["model", "optimizer"])
def test_an_optimizer_whose_gradients_are_thrown_away_delays_no_stop(
    tmp_path: Path, zeroed_by: str
) -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net]
    numbers = []

    def train_one_half() -> None:
        model = AdaptiveDataParallel(net, optimizers)
        zeroed: list[Any] = [model] if zeroed_by == "model" else optimizers
        for number, x in AdaptiveDataLoader(Numbers(20), 2).enumerate():
            numbers.append(number)
            if number == 5:
                request_stop()
            for each in zeroed:
                each.zero_grad()
            model(x[:, None].float()).mean().backward()
            optimizers[0].step()

    assert run_once(train_one_half, tmp_path) is None
    assert numbers[-1] == 5


def test_lbfgs_trains_with_one_replica_as_in_plain_torch(tmp_path: Path) -> None:
    def train_by_closure(*, is_plain: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe")
        model: Any = net if is_plain else AdaptiveDataParallel(net, optimizer)
        for x in AdaptiveDataLoader(Numbers(8), 4):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = (model(x[:, None] / 8) - 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return [each.detach() for each in net.parameters()]

    results = [
        run_once(
            lambda plain=is_plain: train_by_closure(is_plain=plain),
            tmp_path / str(is_plain),
        )
        for is_plain in (True, False)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_lbfgs_is_refused_over_several_replicas() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(1, 1).parameters())
    check_closures([optimizer], world_size=1)
    with pytest.raises(ElasticRunError, match="LBFGS cannot train over 2 replicas"):
        check_closures([optimizer], world_size=2)


def train_and_unfreeze(*, stop_in: int | None = None) -> list[Tensor]:
    """Add parameters after the first epoch, as docs/howto/loops.md has it."""
    torch.manual_seed(0)
    body, head = nn.Linear(1, 3).requires_grad_(False), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)

    def unfreeze() -> None:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": body.parameters(), "lr": 0.01})

    if finished_epochs() >= 1:
        unfreeze()
    model = AdaptiveDataParallel(nn.Sequential(body, head), optimizer)
    loader = AdaptiveDataLoader(Numbers(8), 2, max_local_batch_size=1)
    for epoch in remaining_epochs_until(2):
        for number, x in loader.enumerate():
            if 4 * epoch + number == stop_in and loader.is_step:
                request_stop()
            optimizer.zero_grad()
            model(x[:, None] / 10).square().mean().backward()
            optimizer.step()
        if epoch + 1 == 1:
            unfreeze()
    return [each.detach() for each in model.parameters()]


def test_a_group_that_is_added_later_is_there_after_each_stop(tmp_path: Path) -> None:
    calm = run_once(train_and_unfreeze, tmp_path / "calm")
    for stop_in in range(7):
        directory = tmp_path / str(stop_in)
        stopping = functools.partial(train_and_unfreeze, stop_in=stop_in)
        assert run_once(stopping, directory) is None
        again = run_once(train_and_unfreeze, directory)
        torch.testing.assert_close(again, calm, rtol=0, atol=0)
