"""A step whose gradients came by a way around the model is refused, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, ElasticRunError
from elasticrun.testing import run_generation
from tests.support.generations import generation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


class Training:
    """A model with its optimizers, and what a loop's body has of a batch."""

    def __init__(self, *, kind: Any = torch.optim.SGD, **options: Any) -> None:
        self.net = Net()
        parts = [self.net.body.parameters(), self.net.head.parameters()]
        self.optimizers = [torch.optim.SGD(part, 0.1) for part in parts]
        if kind is not None:
            self.optimizers = [kind(self.net.parameters(), **options)]
        self.model = AdaptiveDataParallel(self.net, self.optimizers)

    def step(self, *losses: Tensor) -> None:
        for loss in losses:
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train(body: Callable[[Training, Tensor], None], **options: Any) -> None:
    torch.manual_seed(0)
    training = Training(**options)
    for x in AdaptiveDataLoader(torch.randn(24, 4), 8):
        body(training, x)


# What is refused.


def by_a_method(on: Training, x: Tensor) -> None:
    on.step(on.model.loss(x))


def by_the_module(on: Training, x: Tensor) -> None:
    on.step(on.net(x).mean())


def behind_a_look(on: Training, x: Tensor) -> None:
    with torch.no_grad():
        on.model(x)
    on.step(on.net(x).mean())


def in_a_later_batch(on: Training, x: Tensor) -> None:
    on.step((on.net if on.optimizers[0].state else on.model)(x).mean())


def in_a_closure(on: Training, x: Tensor) -> None:
    def closure() -> Tensor:
        on.optimizers[0].zero_grad()
        loss = on.model.loss(x)
        loss.backward()
        return loss

    on.optimizers[0].step(closure)


AROUND = [by_a_method, by_the_module, behind_a_look, in_a_later_batch, in_a_closure]


@pytest.mark.parametrize("num_virtual", [None, 2])
@pytest.mark.parametrize("body", AROUND, ids=lambda body: body.__name__)
def test_a_way_around_the_model_is_refused(
    body: Callable[[Training, Tensor], None], num_virtual: int | None
) -> None:
    with (
        generation(virtual_replicas=num_virtual),
        pytest.raises(ElasticRunError, match="without a forward pass through"),
    ):
        train(body, lr=0.1, kind=torch.optim.Adam)


def train_around() -> str:
    with pytest.raises(ElasticRunError) as caught:
        train(by_a_method, lr=0.1)
    return str(caught.value)


@pytest.mark.slow
def test_it_is_refused_over_several_replicas() -> None:
    first, second = run_generation(train_around, 2)
    assert "without a forward pass through" in first
    assert first == second


# What is not.


def two_steps_on_one_gradient(on: Training, x: Tensor) -> None:
    on.model(x).mean().backward()
    on.optimizers[0].step()
    on.optimizers[0].step()
    on.optimizers[0].zero_grad()


def a_second_pass_after_a_first_step(on: Training, x: Tensor) -> None:
    for _ in range(2):
        on.step(on.model(x).mean())


def a_closure(on: Training, x: Tensor) -> None:
    def closure() -> Tensor:
        on.optimizers[0].zero_grad()
        loss = on.model(x).square().mean()
        loss.backward()
        return loss

    on.optimizers[0].step(closure)


def an_optimizer_after_the_other(on: Training, x: Tensor) -> None:
    loss = on.model(x).mean()
    for optimizer in on.optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in on.optimizers:
        optimizer.step()


def each_frozen_in_turn(on: Training, x: Tensor) -> None:
    others = [on.net.head, on.net.body]
    for frozen, optimizer in zip(others, on.optimizers, strict=True):
        frozen.requires_grad_(False)
        on.model(x).mean().backward()
        frozen.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()


def gradients_set_by_hand(on: Training, x: Tensor) -> None:
    with torch.no_grad():
        value = on.model(x).mean()
    for parameter in on.net.parameters():
        parameter.grad = torch.full_like(parameter, float(value))
    on.step()


def gradients_of_autograd(on: Training, x: Tensor) -> None:
    parameters = [*on.net.parameters()]
    found = torch.autograd.grad(on.net(x).mean(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    on.step()


def accumulated(on: Training, x: Tensor) -> None:
    for _ in range(2):
        with on.model.no_sync():
            on.model(x).mean().backward()
    on.step(on.model(x).mean())


def penalized(on: Training, x: Tensor) -> None:
    penalty = sum(p.square().sum() for p in on.net.parameters())
    on.step(penalty, on.model(x).mean())


def penalized_in_a_step_of_its_own(on: Training, x: Tensor) -> None:
    on.step(on.model(x).mean())
    on.step(sum(p.square().sum() for p in on.net.parameters()))


def in_eval_mode(on: Training, x: Tensor) -> None:
    on.model.eval()
    on.step(on.model(x).mean())


TWO = {"kind": None}
LBFGS = {"kind": torch.optim.LBFGS, "max_iter": 3}
SGD = {"lr": 0.1}
RIGHT: dict[Any, dict[str, Any]] = {
    two_steps_on_one_gradient: SGD,
    a_second_pass_after_a_first_step: SGD,
    a_closure: LBFGS,
    an_optimizer_after_the_other: TWO,
    each_frozen_in_turn: TWO,
    gradients_set_by_hand: SGD,
    gradients_of_autograd: SGD,
    accumulated: SGD,
    penalized: SGD,
    penalized_in_a_step_of_its_own: SGD,
    in_eval_mode: SGD,
}


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.__name__)
def test_what_comes_through_the_model_or_by_hand_is_not(
    body: Callable[[Training, Tensor], None],
) -> None:
    with generation():
        train(body, **RIGHT[body])


def test_one_optimizer_of_two_models_steps_with_either() -> None:
    nets = [Net(), Net()]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)
    with generation():
        models = [
            AdaptiveDataParallel(net, optimizer, name=name)
            for net, name in zip(nets, "ab", strict=True)
        ]
        for number, x in enumerate(AdaptiveDataLoader(torch.randn(24, 4), 8)):
            models[number % 2](x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# Parameters that nobody holds.


@pytest.mark.parametrize("num_virtual", [None, 2])
def test_a_layer_that_is_added_to_the_wrapped_module_is_refused(
    num_virtual: int | None,
) -> None:
    with generation(virtual_replicas=num_virtual):
        net = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = AdaptiveDataParallel(net, optimizer)
        net.append(nn.Linear(4, 1))
        optimizer.add_param_group({"params": net[1].parameters()})

        def train() -> None:
            for x in AdaptiveDataLoader(torch.randn(24, 4), 8):
                model(x).mean().backward()
                optimizer.step()

        with pytest.raises(ElasticRunError, match=r"parameter `1\.weight`, which Seq"):
            train()
