"""What steps acts once per global batch, and is otherwise what it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    register,
    remaining_epochs_until,
)
from elasticrun.job.stepping import act_once_per_global_batch, is_between_micro_batches
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once

pytestmark = pytest.mark.usefixtures("job")


def micro_batches(max_local_batch_size: int | None = 2) -> Iterator[Any]:
    """Yield in two global batches of four samples."""
    return iter(
        AdaptiveDataLoader(Numbers(8), 4, max_local_batch_size=max_local_batch_size)
    )


def stepped(parameter: torch.Tensor) -> torch.optim.SGD:
    """Return an optimizer that subtracts one from the parameter in each step."""
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=1.0)


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(()))


def test_between_micro_batches_is_within_a_global_batch_only() -> None:
    assert not is_between_micro_batches()
    assert [is_between_micro_batches() for _ in micro_batches()] == [True, False] * 2
    assert [is_between_micro_batches() for _ in micro_batches(None)] == [False] * 2


def test_registered_optimizer_steps_once(parameter: nn.Parameter) -> None:
    optimizer = stepped(parameter)
    register(optimizer=optimizer)
    for _ in micro_batches():
        optimizer.step()
    assert parameter == -2
    optimizer.step()
    assert parameter == -3


@pytest.mark.parametrize("is_made_first", [True, False])
def test_scheduler_steps_once_and_saves_no_wrapper(
    parameter: nn.Parameter, is_made_first: bool
) -> None:
    optimizer = stepped(parameter)
    if not is_made_first:
        act_once_per_global_batch(optimizer)
    scheduler = StepLR(optimizer, 1, 0.5)
    keys = set(scheduler.state_dict())
    if is_made_first:
        act_once_per_global_batch(optimizer)
    act_once_per_global_batch(scheduler)
    for _ in micro_batches():
        optimizer.step()
        scheduler.step()
    assert parameter == -1.5
    assert scheduler.last_epoch == 2
    assert set(scheduler.state_dict()) == keys
    assert type(scheduler) is StepLR
    assert pickle.loads(pickle.dumps(scheduler)).last_epoch == 2


def test_scheduler_gets_its_arguments(parameter: nn.Parameter) -> None:
    scheduler = ReduceLROnPlateau(stepped(parameter))
    act_once_per_global_batch(scheduler)
    for number, _ in enumerate(micro_batches()):
        scheduler.step(metrics=-number)
    assert scheduler.best == -3
    assert scheduler.last_epoch == 2


@pytest.mark.filterwarnings("default")
def test_what_torch_warns_of_is_the_line_of_the_program(
    parameter: nn.Parameter,
) -> None:
    scheduler = StepLR(torch.optim.SGD([parameter], 0.1), 3)
    act_once_per_global_batch(scheduler)
    with pytest.warns(UserWarning, match=r"before `optimizer.step") as warned:
        scheduler.step()
    with pytest.warns(UserWarning, match="epoch parameter") as warned_again:
        scheduler.step(3)
    places = [each.filename for each in (*warned, *warned_again)]
    assert places == [__file__, __file__]


@pytest.mark.filterwarnings("error")
def test_a_first_step_of_a_scheduler_after_a_restart_is_not_too_early(
    tmp_path: Path, parameter: nn.Parameter
) -> None:
    def script(*, is_cut: bool) -> None:
        optimizer = torch.optim.SGD([parameter], 0.1)
        scheduler = StepLR(optimizer, 3)
        register(optimizer=optimizer, scheduler=scheduler)
        for _ in remaining_epochs_until(1):
            for _ in AdaptiveDataLoader(Numbers(2), 1, name="train"):
                optimizer.step()
            if is_cut:
                raise Crash
            scheduler.step()

    run_once(lambda: script(is_cut=True), tmp_path, save_interval=0)
    run_once(lambda: script(is_cut=False), tmp_path)


def test_registering_twice_changes_nothing(parameter: nn.Parameter) -> None:
    optimizer = stepped(parameter)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    for target in [optimizer, scheduler, optimizer, scheduler]:
        act_once_per_global_batch(target)
    methods = [optimizer.step, scheduler.step, scheduler.state_dict]
    act_once_per_global_batch(optimizer)
    act_once_per_global_batch(scheduler)
    assert [optimizer.step, scheduler.step, scheduler.state_dict] == methods


def test_averaged_model_updates_once_and_can_be_copied_and_pickled() -> None:
    net = nn.Linear(1, 1)
    average = AveragedModel(net)
    act_once_per_global_batch(average)
    copied = copy.deepcopy(average)
    for _ in micro_batches():
        average.update_parameters(net)
    assert (average.n_averaged, copied.n_averaged) == (2, 0)
    copied.update_parameters(net)
    assert (average.n_averaged, copied.n_averaged) == (2, 1)
    pickle.loads(pickle.dumps(average)).update_parameters(net)
    assert average.n_averaged == 2


class Average:
    """Not torch's, and no module: all that it has is its state."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def step(self, *given: Any) -> None:
        self.given += given or [None]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Metric(nn.Module):
    """Has an `update` that is given data, or a model."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def update(self, given: Any, *, number: int = 0) -> None:
        self.given.append(given)


def test_what_torch_does_not_know_acts_once_on_models_and_always_on_data() -> None:
    net, average, metric = nn.Linear(1, 1), Average(), Metric()
    register(average=average, metric=metric)
    for batch in micro_batches():
        average.step()
        average.step(net.parameters())
        average.step([*net.parameters()])
        metric.update(net, number=1)
        metric.update(batch)
    assert len(average.given) == 2 * 3
    assert [type(each) for each in metric.given] == (
        [torch.Tensor, nn.Linear, torch.Tensor] * 2
    )
    assert average.state_dict().keys() == {"given"}


def test_scaler_acts_once(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=1)
    register(optimizer=optimizer, scaler=scaler)
    for _ in micro_batches():
        optimizer.zero_grad()
        scaler.scale(2 * parameter).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert parameter == -4
    assert scaler.get_scale() == 32.0


def test_closure_runs_in_each_micro_batch(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    act_once_per_global_batch(optimizer)
    num_calls = 0

    def closure() -> float:
        nonlocal num_calls
        num_calls += 1
        assert torch.is_grad_enabled()
        parameter.grad = torch.ones(())
        return 5.0

    with torch.no_grad():
        assert [optimizer.step(closure) for _ in micro_batches()] == [5.0] * 4
    assert num_calls == 4
    assert parameter == -2


def test_lbfgs_is_refused_between_micro_batches(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.LBFGS([parameter])
    act_once_per_global_batch(optimizer)
    batches = micro_batches()
    assert next(batches) is not None
    with pytest.raises(ElasticRunError, match="LBFGS .* Leave out max_local"):
        optimizer.step(lambda: 0.0)


def test_objects_of_other_kinds_stay_as_they_are(job: Job) -> None:
    net = nn.Linear(1, 1)
    before = dict(vars(net))
    act_once_per_global_batch(net)
    assert vars(net) == before
