"""What is measured of the noise of gradients, with one replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel
from elasticrun.adaptive import noise
from elasticrun.adaptive.noise import Noise
from tests.parallel.training import warned
from tests.support.generations import generation
from tests.support.noise import KINDS, assert_unbiased, measured
from tests.support.steps import network, samples


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "MEASURED_EACH", 1)


@pytest.mark.usefixtures("job", "each_step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 5])
def test_it_is_that_of_exact_gradients(kind: str, size: int | None) -> None:
    assert_unbiased(measured(kind, size=size))


class Training:
    """A network that is trained by a loop over some samples, and does not move."""

    def __init__(
        self,
        net: nn.Module,
        batch_size: int = 2,
        num_samples: int = 60,
        **options: Any,
    ) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), 0.0)
        self.model = AdaptiveDataParallel(net, self.optimizer, measure_noise=True)
        self.loader = AdaptiveDataLoader(
            TensorDataset(*samples(num_samples)), batch_size, **options
        )

    def backward(self, x: torch.Tensor, y: torch.Tensor, *, zeroes: bool) -> None:
        if zeroes:
            self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()

    def run(self) -> Noise:
        for x, y in self.loader:
            self.backward(x, y, zeroes=True)
            self.optimizer.step()
        return self.model.noise


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("size", [None, 1])
def test_one_batch_in_32_is_measured(size: int | None) -> None:
    training = Training(network(), num_samples=80, max_local_batch_size=size)
    hooked = set()
    num_iterations = 0
    for x, y in training.loader:
        training.backward(x, y, zeroes=True)
        training.optimizer.step()
        num_iterations += 1
        if training.model._gradient_hooks._hooks:
            hooked.add(training.loader.batch_index)
    assert training.model.noise.num_steps == 2
    if size is None:
        assert hooked == {0, 32}
        assert num_iterations == 40 + 2  # Those two came in two micro-batches each.


@pytest.mark.usefixtures("job")
@pytest.mark.filterwarnings("ignore:measure_noise=True measures nothing here")
def test_after_a_measured_step_nothing_asks_for_hooks_but_those_of_the_user() -> None:
    net = nn.Sequential(network(), nn.BatchNorm1d(2).double())  # Not cut in two.
    training = Training(net, 4, 12)
    own, *others = net.parameters()
    called = []
    own.register_hook(lambda gradient: called.append(gradient))
    hooked = []
    for x, y in training.loader:
        training.backward(x, y, zeroes=True)
        training.optimizer.step()
        hooked.append(any(each._backward_hooks is not None for each in others))
    assert hooked == [True, False, False]
    assert len(called) == 3
    assert len(own._backward_hooks or {}) == 1


@pytest.mark.usefixtures("job", "each_step")
def test_gradients_that_add_to_earlier_ones_are_not_measured() -> None:
    training = Training(network(), 12)
    for x, y in training.loader:
        number = training.loader.batch_index
        training.backward(x, y, zeroes=number != 2)
        if number != 1:
            training.optimizer.step()
    assert training.model.noise.num_steps == 3  # 0, 3 and 4.


@pytest.mark.usefixtures("job", "each_step")
def test_sparse_gradients_and_those_of_a_low_precision_count_alike() -> None:
    found = []
    for name, sparse in [("dense", False), ("sparse", True), ("bfloat16", False)]:
        torch.manual_seed(0)
        net = nn.Embedding(8, 3, sparse=sparse)
        if name == "bfloat16":
            net.bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        model = AdaptiveDataParallel(net, optimizer, name=name, measure_noise=True)
        for (x,) in AdaptiveDataLoader(TensorDataset(torch.arange(64) % 5), 6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append((model.noise.covariance, model.noise.squared_norm))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=0.1)


@pytest.mark.usefixtures("job", "each_step")
def test_infinite_gradients_are_not_measured() -> None:
    training = Training(network(), 12)
    for x, y in training.loader:
        if training.loader.batch_index == 2:
            y = y * torch.inf
        training.backward(x, y, zeroes=True)
        for parameter in training.net.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        training.optimizer.step()
    assert training.model.noise.num_steps == 4


@pytest.mark.usefixtures("job", "each_step")
def test_steps_between_losses_of_a_cut_batch_are_not_measured() -> None:
    with warned():
        training = Training(network(), 12, max_local_batch_size=6)
        for x, y in training.loader:
            training.backward(x, y, zeroes=True)
            training.optimizer.step()
            training.backward(x, -y, zeroes=False)
    assert training.model.noise.num_steps == 0


@pytest.mark.usefixtures("job", "each_step")
@pytest.mark.parametrize("size", [None, 6])
def test_batch_norm_needs_micro_batches(size: int | None) -> None:
    net = nn.Sequential(nn.BatchNorm1d(5), network()).double()
    with warned() as caught:
        training = Training(net, 12, max_local_batch_size=size)
        found = training.run()
    texts = [str(each.message) for each in caught]
    assert found.num_steps == (0 if size is None else 5)
    assert len(texts) == (size is None)
    assert all("max_local_batch_size" in text for text in texts)


@pytest.mark.usefixtures("job", "each_step")
def test_evaluation_has_whole_batches() -> None:
    training = Training(network(), 12)
    training.model.eval()
    assert len(list(training.loader)) == 5
    training.model.train()
    assert len(list(training.loader)) == 10


@pytest.mark.usefixtures("job", "each_step")
def test_the_older_half_is_forgotten() -> None:
    training = Training(network(), 3)
    numbers = []
    for x, y in training.loader:
        training.backward(x, y, zeroes=True)
        training.optimizer.step()
        if training.loader.is_step:
            numbers.append(training.model.noise.num_steps)
    assert numbers == [*range(1, 9), *[8] * 8, 9, 9, 10, 10]


@pytest.mark.usefixtures("each_step")
def test_it_is_kept_in_checkpoints(tmp_path: Path) -> None:
    with generation(tmp_path) as job:
        first = Training(network(), 12).run()
        job.save()
    with generation(tmp_path):
        second = Training(network(), 12)
        assert second.model.noise == first
        assert first.num_steps == 5


@pytest.mark.usefixtures("job")
def test_it_is_refused_without_an_optimizer() -> None:
    with pytest.raises(ValueError, match="needs the optimizer"):
        AdaptiveDataParallel(network(), measure_noise=True)


@pytest.mark.usefixtures("job")
def test_a_module_may_have_a_noise_of_its_own() -> None:
    net = network()
    model = AdaptiveDataParallel(net)
    with pytest.raises(AttributeError, match="measure_noise=True"):
        model.noise  # noqa: B018
    net.noise = 3
    assert model.noise == 3
