"""`AdaptiveDataParallel` around one replica: what it is, saves, weighs and hides."""

from __future__ import annotations

import contextlib
import copy
import io
import linecache
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    CombinedLoader,
    ElasticRunError,
    StateNameError,
    remaining_epochs_until,
)
from elasticrun.testing import Job
from tests.support.data import Numbers
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


def linear(value: float = 0.0) -> nn.Linear:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def loader(
    max_local_batch_size: int | None = 2, *, size: int = 8
) -> AdaptiveDataLoader:
    """Return one with global batches of four samples."""
    return AdaptiveDataLoader(
        Numbers(size), 4, max_local_batch_size=max_local_batch_size, name=None
    )


def backward(model: Any, batch: Tensor) -> None:
    """Give each weight the mean of the batch as its gradient."""
    model(batch[:, None].float()).mean().backward()


def hooks_of(model: AdaptiveDataParallel) -> list[Any]:
    return model._gradient_hooks._hooks


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
    with pytest.raises(ValueError, match="static_graph=True: DDP then takes"):
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
        with pytest.raises(TypeError, match="stands where the other is to be"):
            AdaptiveDataParallel(net, *swapped)
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


# What it weighs and hides.


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
        assert_at_line(caught, texts)


@contextlib.contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Return a list that gets the warnings, which are no errors for once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def assert_at_line(caught: list[warnings.WarningMessage], texts: list[str]) -> None:
    """Compare warnings, each of which is to name a line of this file that says so."""
    assert len(caught) == len(texts)
    for each, text in zip(caught, texts, strict=True):
        assert text in str(each.message)
        assert each.filename == __file__
        assert linecache.getline(__file__, each.lineno).endswith("# warned of\n")


# What one replica is told of several.


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
    )


def test_two_heads_with_two_backward_passes_are_warned_of() -> None:
    net = nn.ModuleList([linear(1.0), linear(1.0), linear(1.0)])
    model = AdaptiveDataParallel(TwoHeads(net))
    with warned() as caught:
        for batch in loader(None):
            first, second = model(batch[:, None].float())
            first.mean().backward(retain_graph=True)
            second.mean().backward()  # warned of
    assert_at_line(caught, ["TwoHeads has had two backward passes after one"])


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
    assert model._gradient_hooks._rehearsal is None


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


# What a loss is a mean over.


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


@pytest.mark.parametrize("weighs_both", [True, False])
def test_a_sum_of_weighed_and_other_losses_is_warned_of(weighs_both: bool) -> None:
    model = AdaptiveDataParallel(linear(1.0))
    a, b = loader(2, size=7), AdaptiveDataLoader(Numbers(16), 8, name="b")
    with warned() as caught:
        for first, second in CombinedLoader([a, b], name="both"):
            loss = model.weigh(model(first[:, None].float()).mean(), member=a)
            other = model(second[:, None].float()).mean()
            if weighs_both:
                other = model.weigh(other, member=b)
            (loss + other).backward()  # warned of
    assert_at_line(caught, ["a part is not"] * (not weighs_both))


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


def test_module_that_is_hooked_can_be_saved_whole() -> None:
    net = linear()
    model = AdaptiveDataParallel(net)
    for batch in loader(2, size=4):
        backward(model, batch)
        torch.save(net, io.BytesIO())
        copy.deepcopy(net)
