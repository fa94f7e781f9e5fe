"""Whatever a program does after a boundary: it comes back as it was, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import Variables, register
from elasticrun.checkpoint.states.state import CannotRescueError
from elasticrun.job.rescue import remember
from elasticrun.testing import Job
from tests.job.test_remembering import saved

Changes = dict[str, Callable[[], Any]]


def program() -> tuple[Changes, Changes]:
    """Register states; return changes that are undone, and such that are refused."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    net.register_buffer("small", torch.zeros(50))
    net.register_buffer("large", torch.zeros(10_000))
    small, large = net.get_buffer("small"), net.get_buffer("large")
    weight = net[0].weight
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net(torch.ones(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    values = Variables(best=0.5, rows=[1.0], counts={"a": 1}, large=torch.ones(5000))
    values.nested = {"a": [1]}
    register(net=net, optimizer=optimizer, scheduler=scheduler)

    @torch.no_grad()
    def add(tensor: torch.Tensor, at: int = 0) -> None:
        tensor.view(-1)[at].add_(1)

    undone: Changes = {
        "forward": lambda: net(torch.randn(2, 1, 4, 4)),
        "small": lambda: add(small, 49),
        "small by data": lambda: small.data.add_(1),
        "small elsewhere": lambda: setattr(small, "data", small.data + 1),
        "large": lambda: add(large, 9_999),
        "rate": lambda: optimizer.param_groups[0].update(lr=random.random()),
        "scheduler": scheduler.step,
        "number": lambda: setattr(values, "best", values.best + 1),
        "kind": lambda: setattr(values, "best", round(values.best)),
        "row": lambda: values.rows.append(2.0),
        "rows": lambda: setattr(values, "rows", [3.0]),
        "count": lambda: values.counts.update(a=values.counts["a"] + 1),
        "nested": lambda: values.nested["a"].append(None),
        "new": lambda: setattr(values, "new", torch.zeros(2)),
        "random": random.random,
        "gauss": lambda: random.gauss(0, 1),
        "NumPy": np.random.rand,
        "NumPy's second": np.random.randn,
        "torch": lambda: torch.rand(1),
        "seeds": lambda: (random.seed(1), np.random.seed(1), torch.manual_seed(1)),
    }
    refused: Changes = {
        "parameter": lambda: add(weight, 35),
        "parameter by data": lambda: weight.data.mul_(0.5),
        "parameter elsewhere": lambda: setattr(weight, "data", weight.data * 1),
        "another parameter": lambda: setattr(
            net[0], "bias", nn.Parameter(torch.zeros(4))
        ),
        "another buffer": lambda: net.register_buffer("small", small + 1),
        "no momentum": lambda: optimizer.state.popitem(),
        "large variable": lambda: add(values.large, 4_999),
    }
    return undone, refused


@pytest.mark.parametrize("number", range(7))
def test_each_boundary_comes_back_as_it_was_or_is_refused(
    job: Job, number: int
) -> None:
    drawn = random.Random(number)
    undone, refused = program()
    states = list(job.states)
    for _ in range(60):
        back, before = [remember(state) for state in states], saved(states)
        names = drawn.choices([*undone], k=drawn.randrange(4))
        for name in names:
            undone[name]()
        if drawn.random() < 0.5:  # Else training goes on, to the next boundary.
            put_all_back(back)
            assert saved(states) == before, names

    back = [remember(state) for state in states]
    undone[drawn.choice([*undone])]()
    [*refused.values()][number]()
    with pytest.raises(CannotRescueError):
        put_all_back(back)


def put_all_back(back: list[Callable[[], None]]) -> None:
    for each in back:
        each()


def test_all_that_is_refused_is_tried(job: Job) -> None:
    assert len(program()[1]) == 7
