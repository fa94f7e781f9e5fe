"""Saves and stops wait for the step that takes the gradients, and for nothing else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    register,
    remaining_epochs_until,
    request_stop,
)
from tests.support.data import Numbers
from tests.support.generations import run_once


class Accumulating:
    """Steps after every fourth batch of 20, and asks to stop in some."""

    def __init__(self, *stops: int, every: int = 4) -> None:
        self.stops = stops
        self.every = every
        self.saved_after: list[int] = []

    def __call__(self) -> list[Any]:
        net = nn.Linear(1, 1)
        nn.init.constant_(net.weight, 0.5)
        nn.init.constant_(net.bias, 0.0)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        model = AdaptiveDataParallel(net, optimizer)
        loader = AdaptiveDataLoader(Numbers(20), 1)
        for _ in remaining_epochs_until(1):
            for number, x in loader.enumerate():
                (model(x.float()[:, None]).square().mean() / self.every).backward()
                if number % self.every == self.every - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                if number in self.stops:
                    request_stop()
        return [net.weight.item(), net.bias.item()]


@pytest.mark.parametrize("interval", ["off", 0])
def test_stops_and_saves_wait_while_gradients_accumulate(
    tmp_path: Path, interval: float | str
) -> None:
    whole = run_once(Accumulating(), tmp_path / "whole")
    script = Accumulating(1, 5, 7, 14)
    resumed = [
        run_once(script, tmp_path / "cut", save_interval=interval) for _ in range(4)
    ]
    assert resumed == [None, None, None, whole]  # 5 and 7 stop at the end of 7.


def test_gradients_that_no_step_takes_are_not_waited_for_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> int:
        net = nn.Linear(1, 1)
        model = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), 0.01))
        for x in (loader := AdaptiveDataLoader(Numbers(1000), 1)):
            if loader.index == 0:
                request_stop()
            model(x.float()[:, None]).sum().backward()
            batches.append(loader.batch_index)
        return 0

    batches: list[int] = []
    assert run_once(script, tmp_path) is None
    assert batches == list(range(65))
    assert "for 64 boundaries gradients were computed, but no" in caplog.text


def test_evaluation_is_not_waited_for(tmp_path: Path) -> None:
    def script() -> None:
        net = nn.Linear(1, 1)
        model = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), 0.01))
        model.eval()
        for x in (loader := AdaptiveDataLoader(Numbers(1000), 1)):
            request_stop()
            model(x.float()[:, None])
            batches.append(loader.batch_index)

    batches: list[int] = []
    run_once(script, tmp_path)
    assert batches == [0]


class Player:
    """A module with an optimizer, as a loop's body uses it."""

    def __init__(self, name: str) -> None:
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, 0.5)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.01)
        self.model = AdaptiveDataParallel(net, self.optimizer, name=name)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss

    def closure(self, x: Tensor) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            return self.backward(x)

        return evaluate


def play_against_each_other(one: Player, other: Player, x: Tensor) -> None:
    one.optimizer.zero_grad()
    one.backward(x)
    made = other.model(x)
    one.backward(made.detach())
    one.optimizer.step()
    other.optimizer.zero_grad()
    one.backward(made)
    other.optimizer.step()


def step_a_closure(one: Player, _: Player, x: Tensor) -> None:
    one.optimizer.step(one.closure(x))


def step_and_measure(one: Player, _: Player, x: Tensor) -> None:
    one.optimizer.zero_grad()
    one.backward(x)
    one.optimizer.step()
    one.model(x)


def step_twice(one: Player, _: Player, x: Tensor) -> None:
    step_and_measure(one, _, x)
    step_and_measure(one, _, x)


@pytest.mark.parametrize(
    "body", [play_against_each_other, step_a_closure, step_and_measure, step_twice]
)
def test_passes_after_the_step_are_not_waited_for(
    tmp_path: Path, body: Callable[..., None]
) -> None:
    def script() -> None:
        one, other = Player("one"), Player("other")
        for number, x in AdaptiveDataLoader(Numbers(1000), 2).enumerate():
            if number == 2:
                request_stop()
            body(one, other, x.float()[:, None])
            batches.append(number)

    batches: list[int] = []
    assert run_once(script, tmp_path) is None
    assert max(batches) == 2


def test_gradients_after_the_step_that_the_next_turn_steps_with_are_waited_for(
    tmp_path: Path,
) -> None:
    def script() -> None:
        one = Player("one")
        for x in (loader := AdaptiveDataLoader(Numbers(100), 1)):
            if loader.index == 0:
                request_stop()
            one.optimizer.step()
            one.optimizer.zero_grad()
            one.backward(x.float()[:, None])
            batches.append(loader.batch_index)

    batches: list[int] = []
    assert run_once(script, tmp_path) is None
    assert len(batches) == 65


def test_an_evaluation_in_training_mode_is_not_waited_for(tmp_path: Path) -> None:
    def script() -> None:
        one = Player("one")
        train = AdaptiveDataLoader(Numbers(8), 2)
        valid = AdaptiveDataLoader(Numbers(3), 3)
        for epoch in remaining_epochs_until(3):
            for x in train:
                step_and_measure(one, one, x.float()[:, None])
            for x in valid:
                request_stop()
                one.model(x.float()[:, None])
            epochs.append(epoch)

    epochs: list[int] = []
    assert run_once(script, tmp_path) is None
    assert epochs == []  # The stop was at the evaluation's own boundary.


def test_a_pass_outside_of_loops_is_not_waited_for(tmp_path: Path) -> None:
    def script() -> None:
        one = Player("one")
        for epoch in remaining_epochs_until(3):
            request_stop()
            one.model(torch.ones(1, 1))
            epochs.append(epoch)

    epochs: list[int] = []
    assert run_once(script, tmp_path) is None
    assert epochs == [0]


def test_what_an_epoch_leaves_to_the_next_one_is_waited_for(tmp_path: Path) -> None:
    def script(*stops: int) -> Callable[[], float]:
        def train() -> float:
            one = Player("one")
            loader = AdaptiveDataLoader(Numbers(5), 1)
            for epoch in remaining_epochs_until(2):
                for number, x in loader.enumerate():
                    one.backward(x.float()[:, None])
                    if number % 3 == 2:
                        one.optimizer.step()
                        one.optimizer.zero_grad()
                if epoch in stops:
                    request_stop()
            return one.model.weight.item()

        return train

    whole = run_once(script(), tmp_path / "whole")
    assert run_once(script(0), tmp_path / "cut") is None
    assert run_once(script(0), tmp_path / "cut") == whole


@pytest.mark.parametrize("num_samples", [3, 7])
@pytest.mark.parametrize("save_every", ["epoch", 1])
def test_gradients_over_the_end_of_an_epoch_are_waited_for(
    tmp_path: Path, num_samples: int, save_every: int | str
) -> None:
    """Also where the step was in the generation before, or the epoch has none."""

    def script(stop: int | None = None) -> float:
        one = Player("one")
        loader = AdaptiveDataLoader(Numbers(num_samples), 1)
        for epoch in remaining_epochs_until(4):
            for index, x in loader.enumerate():
                number = num_samples * epoch + index
                one.backward(x.float()[:, None] / 10)
                if number % 4 == 3:
                    one.optimizer.step()
                    one.optimizer.zero_grad()
                if number == stop:
                    request_stop()
        return float(one.model.weight.item())

    whole = run_once(script, tmp_path / "whole")
    for stop in range(2 * num_samples):
        directory = tmp_path / str(stop)
        stopping = functools.partial(script, stop)
        run_once(stopping, directory, save_every=save_every)
        again = functools.partial(script, stop + num_samples - 1)
        run_once(again, directory, save_every=save_every)
        assert run_once(script, directory, save_every=save_every) == whole


def test_steps_outside_of_loops_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those of a loop, nor those of epochs, whose ends are boundaries."""

    def script() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        register(optimizer=optimizer)
        loader = AdaptiveDataLoader(Numbers(600), 1)
        for _ in loader:
            optimizer.step()
        for _ in remaining_epochs_until(600):
            optimizer.step()
        assert caplog.text == ""
        for _ in itertools.islice(itertools.cycle(loader), 600 + 1200):
            optimizer.step()

    run_once(script, tmp_path)
    (said,) = caplog.messages
    assert said.startswith("an optimizer has stepped 500 times since the last boundary")
    assert "its `batches(n)`" in said
    assert "`for step in remaining_steps_until(n):`" in said
