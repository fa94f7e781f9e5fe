"""Each parameter gets back the state of its own, or the optimizer is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from elasticrun import AdaptiveDataParallel, CheckpointError, register, save_all_states
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.job.current import current_job
from tests.checkpoint.inspection.running import run
from tests.support.generations import run_once

Parameters = list[tuple[str, nn.Parameter]]


class Net(nn.Module):
    """Three parameters, of which two have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.c = nn.Parameter(torch.tensor([[5.0]]))


def take_step(net: nn.Module, optimizer: Optimizer) -> None:
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)
    optimizer.step()


def moments(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: optimizer.state[parameter]["exp_avg"].tolist()
        for name, parameter in net.named_parameters()
        if parameter in optimizer.state
    }


def adam(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def parameters_of(net: nn.Module, order: str, **options: Any) -> Any:
    named = dict(net.named_parameters())
    return [{"params": [named[name] for name in order], **options}]


def script(
    make: Callable[[nn.Module], Optimizer],
    register_both: Callable[[nn.Module, Optimizer], object] = lambda net, optimizer: (
        register(model=net, optimizer=optimizer)
    ),
    *,
    steps: bool = True,
) -> Any:
    """Return the moments of a net's parameters, after a step or as they were loaded."""
    net = Net()
    optimizer = make(net)
    register_both(net, optimizer)
    if steps:
        take_step(net, optimizer)
        save_all_states()
    return moments(net, optimizer)


def in_order(order: str) -> Callable[[nn.Module], Optimizer]:
    return lambda net: adam(parameters_of(net, order))


def test_parameters_in_another_order_get_their_own_state(tmp_path: Path) -> None:
    saved = run_once(lambda: script(in_order("abc")), tmp_path)
    loaded = run_once(lambda: script(in_order("cba"), steps=False), tmp_path)
    assert loaded == saved
    said = run(tmp_path, "show", 1, "optimizer")
    assert "state.2.exp_avg" in said.output  # As torch's state dictionaries have it.


def test_a_wrapper_changes_no_names(tmp_path: Path) -> None:
    def wrapped(net: nn.Module, optimizer: Optimizer) -> None:
        AdaptiveDataParallel(net, optimizer)

    def as_ddp_does(net: nn.Module, optimizer: Optimizer) -> None:
        register(optimizer=optimizer, model=nn.DataParallel(net))

    saved = run_once(lambda: script(in_order("abc"), as_ddp_does), tmp_path)
    loaded = run_once(lambda: script(in_order("bac"), wrapped, steps=False), tmp_path)
    assert loaded == saved


@pytest.mark.parametrize("others", ["ab", "abc", "bac"])
def test_names_that_the_optimizer_has_are_compared(tmp_path: Path, others: str) -> None:
    """Of a module that is not registered, and also in a state saved by numbers."""

    def make(net: nn.Module, order: str) -> Optimizer:
        named = dict(net.named_parameters())
        return torch.optim.Adam([(name, named[name]) for name in order])

    def alone(net: nn.Module, optimizer: Optimizer) -> None:
        del net
        current_job().register(StatefulState("optimizer", optimizer))  # As before.

    saved = run_once(lambda: script(lambda net: make(net, "abc"), alone), tmp_path)

    def load() -> Any:
        return script(
            lambda net: make(net, others),
            lambda net, optimizer: register(optimizer=optimizer),
            steps=False,
        )

    if len(others) == 3:
        assert run_once(load, tmp_path) == saved
        return
    with pytest.raises(
        CheckpointError, match=r"are others \(only saved: \['c'\], only"
    ):
        run_once(load, tmp_path)


def test_parameters_in_other_groups_are_refused(tmp_path: Path) -> None:
    def make(net: nn.Module, *orders: str) -> Optimizer:
        return adam([group for order in orders for group in parameters_of(net, order)])

    run_once(lambda: script(lambda net: make(net, "a", "bc")), tmp_path)
    with pytest.raises(CheckpointError, match="optimizer's parameters are in other gr"):
        run_once(lambda: script(lambda net: make(net, "bc", "a")), tmp_path)


def test_an_order_that_shows_only_when_it_is_saved_is_refused(tmp_path: Path) -> None:
    def apart(net: nn.Module, optimizer: Optimizer) -> None:
        register(optimizer=optimizer)
        register(model=net)

    saved = run_once(lambda: script(in_order("abc"), apart), tmp_path)
    assert saved == run_once(lambda: script(in_order("abc"), steps=False), tmp_path)
    with pytest.raises(CheckpointError, match="another order than in the checkpoint"):
        run_once(lambda: script(in_order("bac"), apart), tmp_path)
    run_once(lambda: script(in_order("abc"), apart), tmp_path)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    def alone(net: nn.Module, optimizer: Optimizer) -> None:
        register(optimizer=optimizer)

    run_once(lambda: script(in_order("ab"), alone), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the Adam of this program: exp_avg of number 1 is \[2\], "
        r"but the parameter is \[1, 1\]",
    ):
        run_once(lambda: script(in_order("ac"), alone), tmp_path)


def registered(net: nn.Module, optimizer: Optimizer) -> None:
    register(model=net, optimizer=optimizer)


def in_parallel(net: nn.Module, optimizer: Optimizer) -> None:
    AdaptiveDataParallel(net, optimizer, name="model")


@pytest.mark.parametrize("make_known", [registered, in_parallel])
@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("exp_avg", r"exp_avg of (model\.)?a is of type str, not a tensor"),
        ("step", r"step of (model\.)?a is of type str, not a number or a tensor"),
        ("lr", "lr of group 0 is of type str, not a number"),
    ],
)
def test_an_entry_of_another_kind_is_refused(
    tmp_path: Path, make_known: Callable[..., None], key: str, told: str
) -> None:
    def spoil(net: nn.Module, optimizer: Optimizer) -> None:
        make_known(net, optimizer)
        take_step(net, optimizer)
        [group] = optimizer.param_groups
        of_first = optimizer.state[group["params"][0]]
        (group if key in group else of_first)[key] = "text"
        save_all_states()
        optimizer.state.clear()

    run_once(lambda: script(in_order("abc"), spoil, steps=False), tmp_path)
    with pytest.raises(CheckpointError, match=told):
        run_once(lambda: script(in_order("abc"), make_known, steps=False), tmp_path)


@pytest.mark.parametrize(
    ("before", "now"),
    [(torch.optim.Adam, torch.optim.SGD), (torch.optim.SGD, torch.optim.Adam)],
)
def test_another_kind_of_optimizer_is_refused(
    tmp_path: Path, before: Any, now: Any
) -> None:
    def of(kind: Any) -> Callable[[], None]:
        def run_script() -> None:
            net = Net()
            optimizer = kind(net.parameters(), lr=0.1)
            register(model=net, optimizer=optimizer)
            take_step(net, optimizer)
            save_all_states()

        return run_script

    run_once(of(before), tmp_path)
    with pytest.raises(CheckpointError, match=f"is not that of a {now.__name__}: its"):
        run_once(of(now), tmp_path)


def test_options_that_a_scheduler_or_another_torch_adds_are_no_other_kind(
    tmp_path: Path,
) -> None:
    def make(net: nn.Module, *, is_old: bool) -> Optimizer:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if is_old:  # Before there was `fused`; and with a cycle of rates.
            del optimizer.param_groups[0]["fused"]
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
        return optimizer

    def run_script(*, is_old: bool) -> None:
        net = Net()
        register(model=net, optimizer=make(net, is_old=is_old))
        save_all_states()

    run_once(lambda: run_script(is_old=True), tmp_path)
    run_once(lambda: run_script(is_old=False), tmp_path)


def test_a_group_that_was_added_in_the_loop_is_told_how_to_be_resumed(
    tmp_path: Path,
) -> None:
    def adding(*, adds: bool, comes_before: bool = False) -> Any:
        net = Net()
        optimizer = adam(parameters_of(net, "ab"))
        if comes_before:
            optimizer.add_param_group({"params": [net.c]})
        register(model=net, optimizer=optimizer)
        if adds:
            optimizer.add_param_group({"params": [net.c]})
            take_step(net, optimizer)
            save_all_states()
        return moments(net, optimizer)

    saved = run_once(lambda: adding(adds=True), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"parameters are others \(only saved: \['model.c'\], only here: \[\]\)\. "
        r"It is loaded when .*requires_grad_\(False\).*before you register the",
    ):
        run_once(lambda: adding(adds=False), tmp_path)
    assert run_once(lambda: adding(adds=False, comes_before=True), tmp_path) == saved
    with pytest.raises(CheckpointError, match="has 2 parameter groups.*before you reg"):
        run_once(lambda: register(optimizer=adam(parameters_of(Net(), "ab"))), tmp_path)


@pytest.mark.parametrize("what", ["model", "buffer", "optimizer"])
def test_what_has_no_memory_yet_is_refused(tmp_path: Path, what: str) -> None:
    net = nn.Linear(1, 1, device="meta" if what != "buffer" else None)
    if what == "buffer":
        net.register_buffer("table", torch.ones(1, device="meta"))
    target = adam(net.parameters()) if what == "optimizer" else net
    with pytest.raises(CheckpointError, match=r"'it' is on the meta device.*to_empty"):
        run_once(lambda: register(it=target), tmp_path)
