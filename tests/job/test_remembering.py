"""What is remembered at a boundary comes back, or is known not to."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    State,
    Variables,
    once,
    register,
    remaining_steps_until,
)
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.job.rescue import remember
from elasticrun.testing import Job

Change = Callable[[], Any]


class Counted(State):
    """As a program writes one."""

    def __init__(self) -> None:
        super().__init__(type(self).__name__)
        self.number = 0
        self.history = {"losses": [1.0], "best": np.zeros(3)}

    def save(self, fileobj: Any) -> None:
        values = {**self.history, "best": self.history["best"].tolist()}
        fileobj.write(json.dumps([self.number, values]).encode())

    def load(self, fileobj: Any) -> None:
        self.number, values = json.loads(fileobj.read())
        self.history = {**values, "best": np.array(values["best"])}


def batch_norm() -> Change:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    register(net=net)
    return lambda: net(torch.randn(4, 2))


def optimizer() -> Change:
    own = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
    register(optimizer=own)

    def change() -> None:
        own.param_groups[0]["lr"].mul_(0.5)
        own.param_groups[0]["weight_decay"] = 0.5

    return change


def scheduler() -> Change:
    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    parts = [
        torch.optim.lr_scheduler.LinearLR(own),
        torch.optim.lr_scheduler.ExponentialLR(own, 0.9),
    ]
    chain = torch.optim.lr_scheduler.SequentialLR(own, parts, milestones=[1])
    register(scheduler=chain)
    own.step()  # Or the schedulers warn.
    return lambda: [chain.step() for _ in range(3)]


def variables() -> Change:
    values = Variables(number=1, rows=[1, 2], nested={"a": [1.0]}, tensor=torch.ones(2))

    def change() -> None:
        values.number, values.new = 2, 3
        values.rows.append(3)
        values.nested["a"][0] = 2.0
        values.tensor.add_(1)

    return change


def plain_variables() -> Change:
    values = Variables(number=1, rows=[1, 2])

    def change() -> None:
        values.number, values.new = 2, 3
        values.rows.append(3)

    return change


def state_of_the_programs_own() -> Change:
    state = Counted()

    def change() -> None:
        state.number += 1
        state.history["losses"].append(2.0)
        state.history["best"] += 1

    return change


def accumulator() -> Change:
    total = Accumulator(name="total")
    for _ in AdaptiveDataLoader(range(4), 2):
        total["n"] += 1
    with total.synchronized():
        total["n"] += 1

    def change() -> None:
        with total.synchronized():
            total["n"] += 0.5
            total["other"] = 1

    return change


def loader() -> Change:
    own = AdaptiveDataLoader(range(10), 2)
    return lambda: [*own.batches(7)]


def steps() -> Change:
    list(remaining_steps_until(2))
    return lambda: list(remaining_steps_until(5))


def keys_seen() -> Change:
    once("before")
    return lambda: once("after")


def generators() -> Change:
    np.random.randn()  # Which keeps a second number for the next call, as gauss does.
    random.gauss(0, 1)
    return lambda: (random.random(), np.random.rand(), torch.rand(()))


def second_normal_numbers() -> Change:
    np.random.randn()
    random.gauss(0, 1)
    return lambda: (random.gauss(0, 1), np.random.randn())


CHANGES = [
    *(batch_norm, optimizer, scheduler, variables, plain_variables),
    *(state_of_the_programs_own, accumulator, loader, steps, keys_seen),
    *(generators, second_normal_numbers),
]


def saved(states: list[BaseState]) -> list[bytes]:
    files = [io.BytesIO() for _ in states]
    for state, file in zip(states, files, strict=True):
        state.save(file)
    return [file.getvalue() for file in files]


@pytest.mark.parametrize("make", CHANGES)
def test_each_state_comes_back(job: Job, make: Callable[[], Change]) -> None:
    change = make()
    states = list(job.states)
    for state in states:
        remember(state)  # Of an earlier boundary: it does not keep the later one off.
    before = saved(states)
    put_back = [remember(state) for state in states]
    change()
    assert saved(states) != before
    for _ in range(2):  # For an offer, and by the one that saves.
        for each in put_back:
            each()
        assert saved(states) == before


def test_a_changed_parameter_is_noticed(job: Job) -> None:
    net = nn.Linear(2, 2)
    register(net=net)
    (state,) = [each for each in job.states if each.name == "net"]
    remember(state)()
    put_back = remember(state)
    net.weight.detach().add_(1)
    with pytest.raises(CannotRescueError, match="parameters of 'net' have changed"):
        put_back()
    put_back = remember(state)
    net.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(CannotRescueError, match="parameters of 'net' have changed"):
        put_back()


def test_what_each_replica_has_of_its_own_cannot_be_remembered(job: Job) -> None:
    class Own(Counted):
        is_per_replica = True

    class Synced(Counted):
        def sync(self) -> None:
            pass

    for kind in (Own, Synced):
        state = kind()
        with pytest.raises(CannotRescueError, match="each replica has a part"):
            remember(state)
