"""Steps outside of loops are told, however the optimizer became known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, register
from elasticrun.integrations.accelerate import prepare
from tests.integrations.accelerated import forget_accelerator
from tests.support.data import Numbers
from tests.support.generations import run_once

MANY = 500
Step = Callable[[], Any]

_x = torch.ones(2, 1)


def _backward(net: nn.Module, scale: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    loss = net(_x).mean()
    scale(loss).backward()
    return loss


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(1, 1)
    return net, torch.optim.SGD(net.parameters(), lr=1e-6)


def registered() -> Step:
    net, optimizer = _made()
    register(net=net, optimizer=optimizer)
    return lambda: (_backward(net), optimizer.step())


def registered_by_closure() -> Step:
    net, optimizer = _made()
    register(net=net, optimizer=optimizer)
    return lambda: optimizer.step(lambda: _backward(net))


def parallel() -> Step:
    net, optimizer = _made()
    net = AdaptiveDataParallel(net, optimizer)
    return lambda: (_backward(net), optimizer.step())


def parallel_by_closure() -> Step:
    net, optimizer = _made()
    net = AdaptiveDataParallel(net, optimizer)
    return lambda: optimizer.step(lambda: _backward(net))


def second_of_two() -> Step:
    net = nn.Linear(1, 1)
    first, second = (torch.optim.SGD([each], lr=1e-6) for each in net.parameters())
    net = AdaptiveDataParallel(net, [first, second])
    return lambda: (_backward(net), second.step())


def scaled() -> Step:
    net, optimizer = _made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    register(scaler=scaler)
    net = AdaptiveDataParallel(net, optimizer)

    def step() -> None:
        _backward(net, scaler.scale)
        scaler.step(optimizer)
        scaler.update()

    return step


def accelerated() -> Step:
    accelerator = Accelerator(cpu=True)
    net, optimizer, _ = prepare(accelerator, *_made())
    assert optimizer is not None

    def step() -> None:
        accelerator.backward(net(_x).mean())
        optimizer.step()

    return step


@pytest.fixture
def _own_accelerator() -> Iterator[None]:
    with contextmanager(forget_accelerator)():
        yield


@pytest.mark.usefixtures("_own_accelerator")
@pytest.mark.parametrize(
    "make",
    [
        registered,
        registered_by_closure,
        parallel,
        parallel_by_closure,
        second_of_two,
        scaled,
        accelerated,
    ],
)
def test_many_steps_outside_of_loops_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Step]
) -> None:
    def script() -> None:
        step = make()
        for _ in AdaptiveDataLoader(Numbers(MANY), 1):  # Has boundaries of its own.
            step()
        for _ in range(MANY - 1):
            step()
        assert caplog.text == ""
        step()
        (said,) = caplog.messages
        assert said.startswith(f"an optimizer has stepped {MANY} times since the last")

    with caplog.at_level(logging.WARNING):
        run_once(script, tmp_path)
