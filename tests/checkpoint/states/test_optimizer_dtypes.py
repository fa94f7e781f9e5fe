"""Optimizers whose state has another dtype than their parameters."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elasticrun import register, save_all_states
from elasticrun.checkpoint.states.stateful import StatefulState
from tests.support.generations import run_once

NEAR_ONE = 1 + 2.0**-20  # Which bfloat16 takes for 1.


class WithMasters(Optimizer):
    """Keeps what the parameters would be in float32."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                master = torch.full_like(parameter, NEAR_ONE, dtype=torch.float32)
                self.state[parameter] = {
                    "master": master,
                    "inner": {"row": [master.double()]},
                    "count": torch.tensor(2**40 + 1),
                    "step": torch.tensor(3.0),
                }


def moved(saved: Optimizer, loaded: Optimizer) -> Any:
    """Save one and load it into the other; return the state of its first parameter."""
    buffer = io.BytesIO()
    StatefulState("optimizer", saved).save(buffer)
    buffer.seek(0)
    StatefulState("optimizer", loaded).load(buffer)
    return loaded.state[loaded.param_groups[0]["params"][0]]


def make_parameter(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def test_masters_of_bfloat16_parameters_are_not_rounded() -> None:
    first = WithMasters(iter([make_parameter()]))
    first.step()
    state = moved(first, WithMasters(iter([make_parameter()])))
    assert state["master"].dtype == torch.float32
    assert state["master"].tolist() == [NEAR_ONE] * 3
    assert state["inner"]["row"][0].dtype == torch.float64
    assert state["inner"]["row"][0].tolist() == [NEAR_ONE] * 3
    assert state["count"].tolist() == 2**40 + 1
    assert state["step"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_torchs_own_numbers_are_not_rounded(kind: Callable[..., Optimizer]) -> None:
    parameters = [make_parameter(), make_parameter()]
    first, second = (kind([each]) for each in parameters)
    for _ in range(3):
        first.step()
    state = moved(first, second)
    for key, value in first.state[parameters[0]].items():
        assert state[key].dtype == value.dtype, key
        assert torch.equal(state[key], value), key


class Clipped(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Clipped, torch.optim.Adafactor])
@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
def test_parameters_may_get_another_dtype(
    before: torch.dtype, kind: Callable[..., Optimizer]
) -> None:
    after = torch.bfloat16 if before == torch.float32 else torch.float32
    first, second = (kind([make_parameter(dtype)]) for dtype in (before, after))
    first.step(lambda: 1.0)
    moved(first, second)
    second.step(lambda: 1.0)


def test_a_count_in_a_fused_step_is_as_torch_has_it() -> None:
    first = torch.optim.Adam([make_parameter()])
    first.step()
    (state,) = first.state.values()
    state["step"] = state["step"].double()
    second = torch.optim.Adam([make_parameter()], capturable=True)
    first.param_groups[0]["capturable"] = True
    assert moved(first, second)["step"].dtype == torch.float32


def test_the_programs_own_hooks_stay_the_first_and_the_last() -> None:
    first = WithMasters(iter([make_parameter()]))
    first.step()
    second = WithMasters(iter([make_parameter()]))
    seen: list[Any] = []

    def double(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
        state = {7: {"master": 2 * values["state"][0]["master"]}}
        groups = [{**values["param_groups"][0], "params": [7]}]
        return {"state": state, "param_groups": groups}

    def look(optimizer: Optimizer) -> None:
        seen.extend(each["master"].tolist() for each in optimizer.state.values())

    second.register_load_state_dict_pre_hook(double)
    second.register_load_state_dict_post_hook(look)
    moved(first, second)
    assert seen == [[2 * NEAR_ONE] * 3]
    moved(first, second)
    assert len(seen) == 2  # Nothing of the first time is left.


def test_an_optimizer_that_loads_by_itself_is_left_alone() -> None:
    class Rounds(WithMasters):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)

    first = Rounds(iter([make_parameter()]))
    first.step()
    state = moved(first, Rounds(iter([make_parameter()])))
    assert state["master"].dtype == torch.bfloat16


@pytest.mark.usefixtures("group")
def test_sharded_masters_are_not_rounded(tmp_path: Any) -> None:
    def script() -> list[Tensor]:
        net = nn.Linear(3, 2).bfloat16()
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        optimizer = WithMasters(net.parameters())
        register(model=net, optimizer=optimizer)
        if not optimizer.state:
            optimizer.step()
            save_all_states()
        return [state["master"] for state in optimizer.state.values()]

    first, second = run_once(script, tmp_path), run_once(script, tmp_path)
    assert len(second) == len(first) == 2
    for before, after in zip(first, second, strict=True):
        assert isinstance(after, DTensor)
        assert isinstance(before, DTensor)
        assert after.placements == before.placements
        assert after.dtype == torch.float32
        assert after.to_local().unique().tolist() == [NEAR_ONE]
