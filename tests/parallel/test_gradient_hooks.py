"""What is weighed, and hidden until the last micro-batch, in one replica."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ElasticRunError,
    remaining_epochs_until,
)
from tests.parallel.training import assert_at_line, backward, linear, loader, warned

pytestmark = pytest.mark.usefixtures("job")


def hooks_of(model: AdaptiveDataParallel) -> list[Any]:
    return model._gradient_hooks._hooks


def test_nothing_is_hooked_where_nothing_accumulates() -> None:
    model = AdaptiveDataParallel(linear())
    backward(model, torch.ones(2))
    assert not hooks_of(model)
    for batch in loader(None):
        backward(model, batch)
        assert not hooks_of(model)


def test_hooks_go_when_they_are_not_needed_any_more() -> None:
    model = AdaptiveDataParallel(linear())
    for batch in loader():
        backward(model, batch)
        assert hooks_of(model)
    backward(model, torch.ones(2))
    assert not hooks_of(model)


def test_gradients_are_hidden_until_the_last_micro_batch() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    seen = []
    for batch in loader(1, size=4):
        backward(model, batch)
        assert net.weight.grad is not None
        seen.append(net.weight.grad.item())
        nn.utils.clip_grad_norm_(net.parameters(), 1e-9)
        nn.utils.clip_grad_value_(net.parameters(), 1e-9)
    assert seen == [0, 0, 0, 1.5]


def test_gradients_from_before_are_hidden_with_them() -> None:
    net = nn.Sequential(linear(1.0), linear(1.0))
    earlier = net[1].weight.grad = torch.ones(1, 1)
    model = AdaptiveDataParallel(net)
    seen = []
    for batch in loader(2, size=4):
        model(batch[:, None].float())
        net[0](batch[:, None].float()).mean().backward()
        assert net[1].weight.grad is not None
        seen.append(bool(net[1].weight.grad == 0))
        nn.utils.clip_grad_norm_(net.parameters(), 1e-9)
    assert seen == [True, False]
    assert earlier == 1.0


def test_hooks_that_went_with_moved_parameters_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveDataLoader, "loss_weight", 0.5)
    net = linear()
    model = AdaptiveDataParallel(net)
    for number, batch in enumerate(loader(None, size=12)):
        net.zero_grad()
        if number == 2:
            model.double()
        model(torch.ones(len(batch), 1).to(net.weight.dtype)).mean().backward()
        assert net.weight.grad == 0.5


def test_two_passes_in_a_micro_batch_both_count() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    for batch in loader(3, size=4):
        backward(model, batch)
        (2 * model(batch[:, None].float())).mean().backward()
    assert net.weight.grad is not None
    torch.testing.assert_close(net.weight.grad.item(), 3 * 1.5)


def test_weight_0_gives_zeros_where_the_loss_is_infinite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveDataLoader, "loss_weight", 0.0)
    net = linear()
    model = AdaptiveDataParallel(net)
    for _ in loader(None, size=4):
        (model(torch.ones(1, 1)) * math.inf).sum().backward()
        assert net.weight.grad == 0.0
        (model(torch.ones(1, 1)) * math.nan).sum().backward()
        assert net.weight.grad == 0.0


def test_sparse_gradients_accumulate() -> None:
    net = nn.Embedding(8, 1, sparse=True)
    model = AdaptiveDataParallel(net)
    for batch in loader(3):
        net.zero_grad()
        model(batch).mean().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.is_sparse
    expected = torch.tensor([0.0] * 4 + [0.25] * 4)
    torch.testing.assert_close(net.weight.grad.to_dense()[:, 0], expected)


@pytest.mark.parametrize("is_left_by", ["break", "exception"])
def test_a_global_batch_left_midway_leaves_nothing(is_left_by: str) -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    numbers = loader(1, size=4)
    with contextlib.suppress(KeyError):
        for batch in numbers:
            backward(model, batch + 100)
            if is_left_by == "break":
                break
            raise KeyError
    for batch in numbers:
        backward(model, batch)
    assert net.weight.grad == 1.5


def test_an_epoch_left_by_an_exception_leaves_nothing() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    numbers = loader(1, size=4)
    with contextlib.suppress(KeyError):
        for _ in remaining_epochs_until(1):
            for batch in numbers:
                backward(model, batch + 100)
                raise KeyError
    for _ in remaining_epochs_until(1):
        for batch in numbers:
            backward(model, batch)
    assert net.weight.grad == 1.5


def test_a_step_outside_of_loops_sees_nothing_of_an_abandoned_batch() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    for batch in loader(1):
        backward(model, batch + 100)
        optimizer.step()
        break
    optimizer.step()
    assert net.weight == 0.0


def test_an_abandoned_batch_holds_nothing_in_an_evaluation() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    for batch in loader(1):
        backward(model, batch)
        break
    assert hooks_of(model)
    model(torch.ones(1, 1))  # Without a backward pass, though it could have one.
    assert not hooks_of(model)
    assert net.weight.grad is None


def test_a_step_alone_in_an_abandoned_batch_takes_nothing_from_what_follows() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    backward(model, torch.tensor([100]))
    for _ in loader(1):
        optimizer.step()
        break
    backward(model, torch.tensor([2]))
    optimizer.step()
    assert net.weight == -2.0


def test_gradient_of_an_earlier_micro_batch_alone_counts_in_the_step() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    numbers = loader(2, size=4)
    for batch in numbers:
        optimizer.zero_grad()
        if not numbers.is_step:
            backward(model, batch)
        optimizer.step()
    assert net.weight == -0.25


def test_parameters_that_are_unfrozen_or_moved_are_weighed_too() -> None:
    net = nn.Sequential(linear(1.0), linear(1.0))
    net[0].requires_grad_(False)
    model = AdaptiveDataParallel(net)
    for number, batch in enumerate(loader(2)):
        model.zero_grad()
        if number == 2:
            net[0].requires_grad_()
            model.double()
        model(batch[:, None].to(net[0].weight.dtype)).mean().backward()
    assert (net[0].weight.grad, net[1].weight.grad) == (5.5, 5.5)


def test_two_steps_in_a_micro_batch_are_refused() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    batches = iter(loader())
    batch = next(batches)
    backward(model, batch)
    optimizer.step()
    with pytest.warns(UserWarning, match="a loss was computed after"):
        backward(model, batch)
    with pytest.raises(ElasticRunError, match=r"SGD.step\(\) was called twice in one"):
        optimizer.step()
    assert next(batches) is not None


def test_a_loss_after_a_step_is_warned_of_where_batches_are_cut() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    for size, texts in [(None, []), (2, ["a loss was computed after an optimizer"])]:
        with warned() as caught:
            for batch in loader(size):
                backward(model, batch)
                optimizer.step()
                loss = model(batch[:, None].float()).mean()
                loss.backward()  # warned of
        assert_at_line(caught, texts, __file__)


@pytest.mark.parametrize("zeroed_by", ["model", "optimizer"])
@pytest.mark.parametrize("asks_for_steps", [True, False])
def test_gradients_that_are_zeroed_after_a_backward_pass_are_refused(
    zeroed_by: str, *, asks_for_steps: bool
) -> None:
    """As those of a discriminator that a generator's loss has reached."""
    for size, is_refused in [(None, False), (2, True)]:
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model = AdaptiveDataParallel(net, optimizer, name=f"model-{size}")
        numbers = loader(size, size=4)
        with (
            pytest.raises(ElasticRunError, match=r"zeroed between .* or freeze it")
            if is_refused
            else contextlib.nullcontext()
        ):
            for batch in numbers:
                backward(model, batch + 100)
                (model if zeroed_by == "model" else optimizer).zero_grad()
                backward(model, batch)
                if numbers.is_step or not asks_for_steps:
                    optimizer.step()
        assert net.weight == (0.0 if is_refused else -1.5)


def test_gradients_that_come_after_the_step_are_dropped_when_they_are_zeroed() -> None:
    """As those that a generator's loss leaves in a discriminator which has stepped."""
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    with warned() as caught:
        for batch in loader(1, size=4):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            backward(model, batch + 100)
    assert net.weight == -1.5
    assert len(caught) == 1  # Of the loss after the step.


def test_a_step_that_is_left_out_may_be_zeroed() -> None:
    """As where a loss is infinite, or a GradScaler skips the step."""
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AdaptiveDataParallel(net, optimizer)
    numbers = loader(2)
    for batch in numbers:
        backward(model, batch)
        if numbers.batch_index > 0:
            optimizer.step()
        optimizer.zero_grad()
    assert net.weight == -5.5


def test_module_that_is_hooked_can_be_saved_whole() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    for batch in loader(2, size=4):
        backward(model, batch)
        torch.save(net, io.BytesIO())
        copy.deepcopy(net)
