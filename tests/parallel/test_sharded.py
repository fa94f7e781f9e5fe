"""A module that `fully_shard` has sharded, with one replica: its shard is the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticrun import AdaptiveDataParallel, ElasticRunError
from elasticrun.adaptive import noise
from tests.parallel.training import backward, linear, loader, warned
from tests.support.one_shard import build
from tests.support.sharding import whole

pytestmark = pytest.mark.usefixtures("group", "job")


def sharded(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net


def gradient(model: nn.Module) -> Tensor | None:
    """Return that of the only weight, as the program sees it."""
    (weight,) = model.parameters()
    return None if weight.grad is None else whole(weight.grad)


def test_gradients_of_micro_batches_are_out_of_sight_until_the_last() -> None:
    net = sharded(linear())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = AdaptiveDataParallel(net, optimizer)
    seen = []
    for batch in loader(1):  # The numbers from 0 to 3, then those to 7.
        optimizer.zero_grad()
        backward(model, batch)
        seen.append(gradient(model))
        optimizer.step()
    assert seen == [None, None, None, 1.5, None, None, None, 5.5]
    assert whole(net.weight).item() == pytest.approx(-0.7)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("size", [None, 1])
def test_they_add_to_those_of_earlier_batches(counts: bool, size: int | None) -> None:
    model = AdaptiveDataParallel(sharded(linear()))
    for batch in loader(size):
        if counts:
            count = (batch > 2).sum()
            total = (model(batch[:, None].float())[:, 0] * (batch > 2)).sum()
            model.weigh(total / count.clamp(1), count=count).backward()
        else:
            backward(model, batch)
    expected = 3.0 + 5.5 if counts else 1.5 + 5.5
    torch.testing.assert_close(gradient(model), torch.tensor([[expected]]))


def test_within_no_sync_they_wait() -> None:
    model = AdaptiveDataParallel(sharded(linear()))
    seen = []
    for number, batch in enumerate(loader(None)):
        if number == 0:
            with model.no_sync():
                backward(model, batch)
        else:
            backward(model, batch)
        seen.append(gradient(model))
    assert seen == [None, 7.0]


def test_a_loop_that_is_left_between_micro_batches_is_an_error() -> None:
    model = AdaptiveDataParallel(sharded(linear()))
    for batch in loader(1):
        backward(model, batch)
        break
    batch = next(iter(loader(1)))
    with pytest.raises(ElasticRunError, match="left between two micro-batches"):
        backward(model, batch)


def test_a_batch_whose_gradients_were_averaged_may_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "MEASURED_EACH", 1)
    net = sharded(linear())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
    for batch in loader(1):
        backward(model, batch)
        break
    for batch in loader(1, size=4):
        backward(model, batch)
        optimizer.step()
    assert gradient(model) == 1.5
    assert model.noise.num_steps == 1


def test_with_batch_norm_a_batch_is_not_cut_to_measure_it() -> None:
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
    with warned() as caught:
        for batch in loader(None):
            model(batch[:, None] + torch.zeros(4, 5)).mean().backward()
            optimizer.step()
    (only,) = caught
    assert "max_local_batch_size" in str(only.message)
    assert model.noise.num_steps == 0


class Opaque(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


def test_an_output_without_tensors_to_be_found_is_refused() -> None:
    model = AdaptiveDataParallel(sharded(Opaque(1, 1)))
    with pytest.raises(TypeError, match="returned a SimpleNamespace"):
        model(torch.zeros(1, 1))
    with torch.no_grad():
        assert model(torch.zeros(1, 1)).y.shape == (1, 1)


def test_what_ddp_alone_has_is_refused() -> None:
    net = sharded(linear())
    with pytest.raises(TypeError, match="to have the options bucket_cap_mb"):
        AdaptiveDataParallel(net, bucket_cap_mb=1)
    model = AdaptiveDataParallel(net)
    with pytest.raises(ElasticRunError, match="set_custom_reduce_scatter"):
        model.register_comm_hook(None, lambda *_: None)


def test_a_module_that_is_sharded_in_parts_is_refused() -> None:
    net = nn.Sequential(sharded(linear()), linear())
    with pytest.raises(ElasticRunError, match="not by a fully_shard of the whole"):
        AdaptiveDataParallel(net)
