"""One replica is told of what several would refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elasticrun import (
    AdaptiveDataParallel,
)
from tests.parallel.training import assert_at_line, backward, linear, loader, warned

pytestmark = pytest.mark.usefixtures("job")


def test_unused_parameters_and_late_gradients_are_warned_of() -> None:
    net = nn.ModuleList([linear(1.0), linear(1.0)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(Chosen(net), optimizer)
    with warned() as caught:
        for batch in loader(None):
            optimizer.zero_grad()
            output = model(batch[:, None].float())
            output.mean().backward(retain_graph=True)
            output.sum().backward()  # warned of
            optimizer.step()  # warned of
    assert_at_line(
        caught,
        [
            "Chosen has had two backward passes after one forward",
            "SGD steps without a gradient of net.1.weight, on which",
        ],
        __file__,
    )


def test_two_heads_with_two_backward_passes_are_warned_of() -> None:
    net = nn.ModuleList([linear(1.0), linear(1.0), linear(1.0)])
    model = AdaptiveDataParallel(TwoHeads(net))
    with warned() as caught:
        for batch in loader(None):
            first, second = model(batch[:, None].float())
            first.mean().backward(retain_graph=True)
            second.mean().backward()  # warned of
    assert_at_line(caught, ["TwoHeads has had two backward passes after one"], __file__)


def test_only_some_names_of_many_unused_parameters_are_told() -> None:
    for number in (6, 7):
        net = nn.ModuleList([linear(1.0) for _ in range(number)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = AdaptiveDataParallel(Chosen(net), optimizer, name=f"model-{number}")
        with warned() as caught:
            for batch in loader(None):
                backward(model, batch)
                optimizer.step()
        (only,) = caught
        names, _ = str(only.message).split(", on which")
        more = " and 1 more" * (number == 7)
        assert names.endswith(f", net.5.weight{more}")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_frozen_parameters_and_those_that_may_be_unused_are_not_warned_of(
    *, is_frozen: bool
) -> None:
    net = nn.ModuleList([linear(1.0), linear(1.0)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(
        Chosen(net), optimizer, find_unused_parameters=not is_frozen
    )
    for _ in loader(None):
        optimizer.step()  # Without a forward pass of the model.
    if is_frozen:
        net[1].requires_grad_(False)
    for batch in loader(None):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def test_what_comes_after_the_first_steps_is_not_looked_for() -> None:
    net = nn.ModuleList([linear(1.0), linear(1.0)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = Chosen(net, chosen=2)
    model = AdaptiveDataParallel(chosen, optimizer)
    for number, batch in enumerate(loader(None, size=44)):
        optimizer.zero_grad()
        output = model(batch[:, None].float())
        if number == 9:
            chosen.chosen = 1
            output.mean().backward(retain_graph=True)
        output.mean().backward()
        optimizer.step()
    assert chosen.chosen == 1
    first_steps = model._gradient_hooks._first_steps
    assert first_steps is not None
    assert first_steps.is_over


class Chosen(nn.Module):
    """Uses the first of its layers, one or as many as it is told."""

    def __init__(self, net: nn.ModuleList, chosen: int = 1) -> None:
        super().__init__()
        self.net = net
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net[: self.chosen]:
            x = layer(x)
        return x


class TwoHeads(nn.Module):
    def __init__(self, net: nn.ModuleList) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net[0](x)
        return self.net[1](y), self.net[2](y)
