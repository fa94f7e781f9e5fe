"""`AdaptiveDataParallel` around one replica: what it is, and what it saves."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elasticrun import (
    AdaptiveDataParallel,
    CheckpointError,
    StateNameError,
    remaining_epochs_until,
)
from elasticrun.testing import Job
from tests.parallel.training import backward, linear, loader
from tests.support.generations import generation

pytestmark = pytest.mark.usefixtures("job")


class Net(nn.Module):
    """Has what a module can have: a buffer, a method, a submodule with versions."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x)) * self.scale
        return y

    def generate(self) -> str:
        return "generated"


# What it is.


def test_names_are_those_of_the_bare_module() -> None:
    net = Net()
    model = AdaptiveDataParallel(net)
    assert dict(model.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert [*model.parameters()] == [*net.parameters()]
    assert dict(model.named_buffers()).keys() == dict(net.named_buffers()).keys()
    assert model.state_dict().keys() == net.state_dict().keys()
    assert model.module is net


def test_attributes_fall_through_to_the_module() -> None:
    model = AdaptiveDataParallel(Net())
    assert model.generate() == "generated"
    assert model.norm.num_features == 2
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing


def test_mode_and_type_are_passed_on() -> None:
    net = Net().eval()
    model = AdaptiveDataParallel(net)
    assert not model.training
    model.train()
    assert net.norm.training
    model.eval()
    assert not net.norm.training
    assert model.to(torch.float64) is model
    assert net.linear.weight.dtype == torch.float64


def test_copies_are_copies_of_the_bare_module() -> None:
    net = Net()
    model = AdaptiveDataParallel(net)
    assert type(copy.deepcopy(model)) is Net
    average = AveragedModel(model)
    average.update_parameters(model)
    assert average.state_dict().keys() == AveragedModel(net).state_dict().keys()


def test_no_sync_is_there_at_world_size_1() -> None:
    with AdaptiveDataParallel(Net()).no_sync():
        pass


def test_unknown_options_are_refused_at_every_world_size() -> None:
    with pytest.raises(TypeError, match="got 'find_unused', which is neither"):
        AdaptiveDataParallel(Net(), find_unused=True)
    with pytest.raises(ValueError, match="static_graph=True: DDP then expects"):
        AdaptiveDataParallel(Net(), static_graph=True)


def test_module_without_parameters_to_train_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Linear has no parameter that requires a grad"
    ):
        AdaptiveDataParallel(linear().requires_grad_(False))


def test_object_without_a_state_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"lr_scheduler-0 is a list, which has no state"
    ):
        AdaptiveDataParallel(Net(), None, [[]])


def test_a_class_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer is the class SGD, which"):
        AdaptiveDataParallel(Net(), torch.optim.SGD)


def test_optimizer_and_scheduler_that_are_swapped_are_refused() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for swapped in [(scheduler, optimizer), (scheduler,), (None, optimizer)]:
        with pytest.raises(TypeError, match="is in the place of the other one"):
            AdaptiveDataParallel(net, *swapped)
    with pytest.raises(TypeError, match="SGD stands in the place of the module"):
        AdaptiveDataParallel(optimizer, net)
    AdaptiveDataParallel(net, optimizer, scheduler)


def test_an_optimizer_of_another_module_is_refused() -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match="SGD has none of the parameters of Linear"):
        AdaptiveDataParallel(linear(), optimizer)
    both = nn.Sequential(net, linear())
    AdaptiveDataParallel(both, optimizer)


def test_a_module_is_wrapped_once() -> None:
    model = AdaptiveDataParallel(linear())
    for module in (model, nn.Sequential(model)):
        with pytest.raises(TypeError, match="is or has an AdaptiveDataParallel"):
            AdaptiveDataParallel(module, name="outer")


# What it saves.


def test_states_are_named_after_the_module(job: Job) -> None:
    first, second = linear(), linear()
    optimizers = [
        torch.optim.SGD(first.parameters()),
        torch.optim.SGD(second.parameters()),
    ]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    AdaptiveDataParallel(first, optimizers[:1], schedule)
    AdaptiveDataParallel(second, optimizers[1], [schedule], name="critic")
    path = job.save()
    assert path is not None
    assert {each.name for each in path.iterdir()} >= {
        *["model", "optimizer-0", "lr_scheduler"],
        *["critic", "critic.optimizer", "critic.lr_scheduler-0"],
    }
    with pytest.raises(StateNameError, match="'model' is taken"):
        AdaptiveDataParallel(linear())


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_a_compiled_module_keeps_its_names(tmp_path: Path) -> None:
    with generation(tmp_path) as job:
        model = AdaptiveDataParallel(compiled(linear(7.0)))
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        path = job.save()
    assert isinstance(path, Path)
    assert [*torch.load(path / "model", weights_only=True)] == ["weight"]
    with generation(tmp_path):
        AdaptiveDataParallel(net := linear())
    assert net.weight == 7.0
    with generation(tmp_path):
        AdaptiveDataParallel(compiled(net := linear()))
    assert net.weight == 7.0


@pytest.mark.parametrize(
    "keys", ["_orig_mod.{}", "_orig_mod.module.{}", "module._orig_mod.{}"]
)
def test_a_state_that_a_compiled_module_has_saved_loads(keys: str) -> None:
    state = {keys.format("weight"): torch.full((1, 1), 7.0)}
    for module in (linear(), compiled(linear())):
        model = AdaptiveDataParallel(module, name=f"model-{type(module).__name__}")
        model.load_state_dict(state)
        assert model.weight == 7.0


def test_it_cannot_be_pickled_and_says_what_can() -> None:
    model = AdaptiveDataParallel(linear())
    with pytest.raises(TypeError, match=r"Save model\.state_dict\(\)"):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_states_with_and_without_prefix_load(prefix: str) -> None:
    saved = nn.ModuleDict({"module": Net()}) if prefix else Net()
    nn.init.constant_(next(saved.parameters()), 7.0)
    state = saved.state_dict()
    keys = set(state)
    net = Net()
    AdaptiveDataParallel(net).load_state_dict(state)
    assert (net.linear.weight == 7.0).all()
    assert set(state) == keys


def test_module_that_has_a_child_called_module_keeps_its_keys() -> None:
    net = nn.ModuleDict({"module": linear()})
    model = AdaptiveDataParallel(net)
    state = {
        key: torch.full_like(value, 7.0) for key, value in net.state_dict().items()
    }
    model.load_state_dict(state)
    assert net["module"].weight == 7.0
    model.load_state_dict({f"module.{key}": value + 1 for key, value in state.items()})
    assert net["module"].weight == 8.0


def test_state_of_another_module_is_refused(tmp_path: Path) -> None:
    with generation(tmp_path) as job:
        AdaptiveDataParallel(nn.Linear(1, 2))
        job.save()
    with (
        generation(tmp_path),
        pytest.raises(CheckpointError, match=r"'model' does not"),
    ):
        AdaptiveDataParallel(nn.Linear(1, 3))


def test_everything_comes_back_in_the_next_generation(tmp_path: Path) -> None:
    def train(num_epochs: int) -> tuple[Tensor, Any, int]:
        net = linear(1.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model = AdaptiveDataParallel(net, optimizer, scheduler)
        train_loader = loader()
        for _ in remaining_epochs_until(num_epochs):
            for batch in train_loader:
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
                scheduler.step()
        return net.weight.detach(), optimizer.state_dict(), scheduler.last_epoch

    with generation(tmp_path / "once"):
        expected = train(3)
    with generation(tmp_path / "often"):
        train(1)
    with generation(tmp_path / "often"):
        torch.testing.assert_close(train(3), expected, rtol=0, atol=0)
    assert expected[2] == 6
