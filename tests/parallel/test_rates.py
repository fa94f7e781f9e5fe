"""Learning rates that follow the size of global batches, with one replica."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    ElasticRunError,
    request_stop,
)
from elasticrun.adaptive import noise
from elasticrun.job.noise_record import NoiseRecord
from tests.parallel.training import linear
from tests.support.data import Numbers
from tests.support.generations import run_once
from tests.support.steps import network, samples

PLAN = {0: 4, 8: 16}  # Batches of 4, 4, 16, 16 and 4 samples, of 44.


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "MEASURED_EACH", 1)


def moved(optimizer_class: type[Optimizer], scaling: Any) -> list[float]:
    """Return how far each step goes whose gradient is 1 and whose rate is 1."""
    net = linear()
    optimizer = optimizer_class(net.parameters(), lr=1.0)  # type: ignore[call-arg]
    model = AdaptiveDataParallel(net, optimizer, scaling=scaling)
    steps = []
    for _ in AdaptiveDataLoader(Numbers(44), PLAN):
        before = net.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        steps.append(before - net.weight.item())
        assert optimizer.param_groups[0]["lr"] == 1.0
    return steps


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("optimizer_class", "scaling", "factor"),
    [
        (SGD, None, 1.0),
        (SGD, "linear", 4.0),
        (SGD, "sqrt", 2.0),
        (Adam, "auto", 2.0),
        (Adam, "linear", 4.0),
    ],
)
def test_rates_follow_the_planned_size(
    optimizer_class: type[Optimizer], scaling: str | None, factor: float
) -> None:
    steps = moved(optimizer_class, scaling)
    assert steps == pytest.approx([1, 1, factor, factor, factor], rel=1e-5)


@pytest.mark.usefixtures("job")
def test_outside_of_loops_rates_are_not_scaled() -> None:
    net = linear()
    optimizer = SGD(net.parameters(), 1.0)
    model = AdaptiveDataParallel(net, optimizer, scaling="linear")
    model(torch.ones(1, 1)).mean().backward()
    optimizer.step()
    assert net.weight.item() == -1


class Failing(SGD):
    """Fails in its step, and remembers the rate that it was to use."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.rate = self.param_groups[0]["lr"]
        raise RuntimeError("no step")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_rates_are_put_back_after_an_exception(rate: float | Tensor) -> None:
    net = linear()
    optimizer = Failing(net.parameters(), rate)
    model = AdaptiveDataParallel(net, optimizer, scaling="linear")
    for _ in AdaptiveDataLoader(Numbers(24), {0: 4, 4: 8}):
        model(torch.ones(1, 1)).mean().backward()
        with pytest.raises(RuntimeError, match="no step"):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.rate == 1.0


class Training:
    """Trains with AdaScale; counts what each step is to be worth, too."""

    def __init__(self, scaling: Any = "adascale") -> None:
        torch.manual_seed(0)
        self.net = network()
        self.optimizer = SGD(self.net.parameters(), 0.05)
        self.scheduler = StepLR(self.optimizer, 10**9)
        self.model = AdaptiveDataParallel(
            self.net, self.optimizer, self.scheduler, scaling=scaling
        )
        self.loader = AdaptiveDataLoader(
            TensorDataset(*samples(60)), {0: 4, 20: 16, 100: 32}, shuffle=True
        )

    def run(self, num_batches: int = 20, stop_at: int | None = None) -> list[Tensor]:
        for x, y in self.loader.batches(num_batches):
            if self.loader.is_first and self.loader.batch_index == stop_at:
                request_stop()
            self.optimizer.zero_grad()
            mse_loss(self.model(x), y).backward()
            self.step()
            self.scheduler.step()
        return [each.detach() for each in self.net.parameters()]

    def step(self) -> None:
        self.optimizer.step()


class Counting(Training):
    expected = 0.0

    def step(self) -> None:
        size, base = self.loader.planned_sizes
        gain = self.model.noise.gain(size, base=base)
        assert 1 <= gain <= size / base
        self.optimizer.step()
        if self.loader.is_step:
            self.expected += gain
            assert self.model.progress == pytest.approx(self.expected)
            assert self.scheduler.last_epoch in (
                math.floor(self.expected - gain),
                math.floor(self.expected),
            )


@pytest.mark.usefixtures("job", "each_step")
def test_adascale_counts_its_gain_as_progress_which_schedulers_follow() -> None:
    training = Counting()
    training.run()
    assert training.model.progress > 25
    assert training.scheduler.last_epoch == math.floor(training.model.progress)


@pytest.mark.usefixtures("job", "each_step")
def test_a_function_is_given_the_gain() -> None:
    given = []

    def rule(gain: float) -> float:
        given.append(gain)
        return 0.0

    training = Training(rule)
    before = [each.clone() for each in training.net.parameters()]
    for now, then in zip(training.run(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)
    assert given[:6] == [1.0] * 5 + [given[5]]
    assert given[5] > 1


def trained(training: Training) -> list[Tensor]:
    return [*training.run(), torch.tensor(training.model.progress)]


@pytest.mark.usefixtures("each_step")
def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    calm = run_once(lambda: trained(Training()))

    def stopped() -> None:
        Training().run(stop_at=11)

    def resumed() -> list[Tensor]:
        training = Training()
        assert training.model.progress > 11
        return trained(training)

    assert run_once(stopped, tmp_path) is None
    for one, other in zip(run_once(resumed, tmp_path), calm, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("job")
def test_members_of_a_combined_loader_have_no_one_size() -> None:
    loader = AdaptiveDataLoader(Numbers(44), PLAN)
    net = linear()
    optimizer = SGD(net.parameters(), 1.0)
    model = AdaptiveDataParallel(net, optimizer, scaling="sqrt")
    for _ in CombinedLoader([loader], "min_size"):
        model(torch.ones(1, 1)).mean().backward()
        with pytest.raises(ElasticRunError, match="cannot follow the batch sizes"):
            optimizer.step()
        break


@pytest.mark.usefixtures("job")
def test_an_unknown_rule_is_refused() -> None:
    net: nn.Module = linear()
    with pytest.raises(ValueError, match="scaling='double' must be one of"):
        AdaptiveDataParallel(net, SGD(net.parameters(), 1.0), scaling="double")  # type: ignore[arg-type]


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("scaling", ["auto", "linear", "adascale"])
def test_rates_that_cannot_be_found_are_refused(scaling: Any) -> None:
    net: nn.Module = linear()
    with pytest.raises(ValueError, match="given none"):
        AdaptiveDataParallel(net, scaling=scaling)
    with pytest.raises(ValueError, match="given a Linear"):
        AdaptiveDataParallel(net, linear(), scaling=scaling)


@pytest.mark.usefixtures("job")
def test_replicas_exchange_what_they_have_measured_in_those_steps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, calls = Training(), []
    sum_parts = NoiseRecord.sum_parts

    def noted(record: NoiseRecord) -> None:
        calls.append(training.loader.batch_index)
        sum_parts(record)

    monkeypatch.setattr(NoiseRecord, "sum_parts", noted)
    training.run(num_batches=70)
    assert calls == [0, 32, 64, 0]  # And in the save at the end.


@pytest.mark.usefixtures("job")
def test_progress_is_counted_only_where_rates_follow_the_gain() -> None:
    net = linear()
    model = AdaptiveDataParallel(net, SGD(net.parameters(), 1.0), scaling="linear")
    with pytest.raises(AttributeError, match="adascale"):
        model.progress  # noqa: B018
