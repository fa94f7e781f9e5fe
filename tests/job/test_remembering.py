"""What is remembered at a boundary comes back, or is known not to."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import io
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    State,
    Variables,
    once,
    register,
    remaining_steps_until,
)
from elasticrun.checkpoint.states.remembered import (
    RememberedValues,
    exact,
    form_of,
    without,
)
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.job.current import current_job
from elasticrun.job.noise_record import NoiseRecord, StepPart
from elasticrun.job.replay import ReplayedStates
from elasticrun.job.rescue import remember
from elasticrun.testing import Job

Change = Callable[[], Any]
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


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


def codebook() -> Change:
    """As a VQ-VAE changes its codes."""
    net = nn.Linear(2, 2)
    net.register_buffer("codes", torch.ones(3, 2))
    register(net=net)
    net.codes.data.mul_(0.5)  # Since the earlier boundary.
    return lambda: net.codes.data.mul_(0.5)


def optimizer() -> Change:
    own = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
    own.param_groups[0]["betas"] = [0.9, 0.99]
    register(optimizer=own)

    def change() -> None:
        own.param_groups[0]["lr"].mul_(0.5)
        own.param_groups[0]["weight_decay"] = 0.5
        own.param_groups[0]["betas"][0] = 0.8
        own.param_groups[0]["initial_lr"] = 0.1  # As a scheduler that is made late.

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
        values.tensor.data.add_(1)

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


def noise() -> Change:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    AdaptiveDataParallel(net, own, measure_noise=True)
    (record,) = [each for each in current_job().states if each.name == "noise"]
    assert isinstance(record, NoiseRecord)
    part = StepPart(torch.tensor([1.5, 2.0, 2.0]), (4, 4), 8)
    record.add(part)
    record.sum_parts()

    def change() -> None:
        record.add(part)
        record.sum_parts()
        record.add(part)
        record.progress += 1

    return change


def generators() -> Change:
    np.random.randn()  # Which keeps a second number for the next call, as gauss does.
    random.gauss(0, 1)
    return lambda: (random.random(), np.random.rand(), torch.rand(()))


def second_normal_numbers() -> Change:
    np.random.randn()
    random.gauss(0, 1)
    return lambda: (random.gauss(0, 1), np.random.randn())


CHANGES = [
    *(batch_norm, codebook, noise, optimizer, scheduler, variables, plain_variables),
    *(state_of_the_programs_own, accumulator, loader, steps, keys_seen),
    *(generators, second_normal_numbers),
]


def state_called(name: str) -> BaseState:
    (state,) = [each for each in current_job().states if each.name == name]
    return state


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


OPTIMIZERS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and each is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_of_torchs_optimizers_comes_back(job: Job, kind: Any) -> None:
    sparse = kind is torch.optim.SparseAdam
    net = nn.Embedding(4, 2, sparse=True) if sparse else nn.Linear(2, 2, bias=False)
    own = kind(net.parameters(), lr=0.1)
    register(optimizer=own)
    state = state_called("optimizer")
    net(torch.tensor([1, 2]) if sparse else torch.ones(2)).sum().backward()
    own.step(lambda: net.weight.sum())  # LBFGS wants a closure.
    before = saved([state])
    put_back = remember(state)
    for group in own.param_groups:
        group["lr"], group["initial_lr"] = 0.5, 0.1
    assert saved([state]) != before
    put_back()
    assert saved([state]) == before


def schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    of = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda own: of.LambdaLR(own, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda own: of.MultiplicativeLR(own, lambda _: 0.9),
        "StepLR": lambda own: of.StepLR(own, 1),
        "MultiStepLR": lambda own: of.MultiStepLR(own, [1, 2, 2]),
        "ConstantLR": lambda own: of.ConstantLR(own, total_iters=2),
        "LinearLR": of.LinearLR,
        "ExponentialLR": lambda own: of.ExponentialLR(own, 0.9),
        "PolynomialLR": of.PolynomialLR,
        "CosineAnnealingLR": lambda own: of.CosineAnnealingLR(own, 5),
        "CosineAnnealingWarmRestarts": lambda own: of.CosineAnnealingWarmRestarts(
            own, 2
        ),
        "CyclicLR": lambda own: of.CyclicLR(own, 0.1, 0.5, 2),
        "OneCycleLR": lambda own: of.OneCycleLR(own, 0.5, 9),
        "ReduceLROnPlateau": of.ReduceLROnPlateau,
        "ChainedScheduler": lambda own: of.ChainedScheduler([of.StepLR(own, 1)]),
        "SequentialLR": lambda own: of.SequentialLR(
            own, [of.LinearLR(own), of.MultiStepLR(own, [2])], milestones=[1]
        ),
        "SWALR": lambda own: torch.optim.swa_utils.SWALR(own, 0.05, anneal_epochs=2),
    }


@pytest.mark.parametrize("name", schedulers())
def test_each_of_torchs_schedulers_comes_back(job: Job, name: str) -> None:
    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = schedulers()[name](own)
    register(scheduler=scheduler)
    own.step()  # Or the schedulers warn.
    states = [state_called("scheduler")]
    before = saved(states)
    put_back = remember(states[0])
    for _ in range(2):
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
    assert saved(states) != before
    put_back()
    assert saved(states) == before


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Best:
    loss: float
    at: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    seen: set[int]


class Point(NamedTuple):
    x: int
    tags: list[str]


# Values of a state, each with what changes it in place, if anything can.
VALUES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "np.float32": (np.float32(0.5), id),
    "np.int64": (np.int64(5), id),
    "nan": (float("nan"), id),
    "Enum": (Color.RED, id),
    "datetime": (datetime.datetime(2024, 1, 1), id),
    "timedelta": (datetime.timedelta(1), id),
    "Path": (Path("a"), id),
    "Counter": (Counter("aab"), lambda own: own.update("bc")),
    "OrderedDict": (OrderedDict(a=1, b=2), lambda own: own.move_to_end("a")),
    "defaultdict": (defaultdict(list, a=[1]), lambda own: own["a"].append(own["b"])),
    "deque": (deque([1, 2], maxlen=2), lambda own: own.append(3)),
    "namedtuple": (Point(1, ["a"]), lambda own: own.tags.append("b")),
    "dataclass": (Best(1.0, [1]), lambda own: own.at.append(2)),
    "frozen": (Frozen("a", {1}), lambda own: own.seen.add(2)),
    "array": (np.ones(3), lambda own: own.fill(0)),
    "nested": ({"a": [deque([(1, Best(2.0, []))])]}, lambda own: own["a"][0].clear()),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_state_come_back_whoever_has_them(job: Job, name: str) -> None:
    value, change = VALUES[name]
    holder = Counted()
    holder.history = {"kept": value, "later": value}
    expected = copy.deepcopy(value)
    put_back = remember(holder)
    change(value)
    holder.history["later"] = None
    put_back()
    for each in (value, *holder.history.values()):
        assert type(each) is type(expected)
        assert repr(each) == repr(expected)
        assert each is value


def scaler() -> tuple[Any, Callable[[], object]]:
    own = torch.amp.GradScaler("cpu", init_scale=2.0)
    return own, lambda: None  # It changes in a step alone.


def average() -> tuple[Any, Callable[[], object]]:
    swa = torch.optim.swa_utils
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    own = swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    own.update_parameters(net)
    return own, lambda: own.train()(torch.randn(4, 2))


@pytest.mark.parametrize("make", [scaler, average])
def test_scalers_and_averages_come_back(
    job: Job, make: Callable[[], tuple[Any, Callable[[], object]]]
) -> None:
    own, change = make()
    register(own=own)
    state = state_called("own")
    before = saved([state])
    put_back = remember(state)
    change()
    put_back()
    assert saved([state]) == before


def test_an_average_that_has_followed_since_is_noticed(job: Job) -> None:
    own, _ = average()
    register(own=own)
    put_back = remember(state_called("own"))
    own.update_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(CannotRescueError, match="change them behind optimizer.step()"):
        put_back()


@pytest.mark.parametrize("name", schedulers())
def test_each_of_torchs_schedulers_is_shown_as_it_was_at_an_anchor(
    job: Job, name: str
) -> None:
    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = schedulers()[name](own)
    register(scheduler=scheduler)
    own.step()
    replayed, state = ReplayedStates(job.states), state_called("scheduler")
    before = exact(form_of(state.current()))
    replayed.anchors.add((0, 0, True))
    for _ in range(2):
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
    assert exact(form_of(state.current())) != before
    replayed.begin(lambda state: None)
    replayed.pass_anchor((0, 0, True))
    assert exact(form_of(state.current())) == before


def test_all_of_torchs_schedulers_are_tried() -> None:
    of = torch.optim.lr_scheduler
    bases = {"LRScheduler", "_LRScheduler"}
    names = {
        name
        for name, each in vars(of).items()
        if isinstance(each, type) and name.endswith(("LR", "Restarts", "Scheduler"))
    }
    assert names | {"ReduceLROnPlateau", "SWALR"} == schedulers().keys() | (
        names & bases
    )


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.tensor([[1, 0], [2, 3]]).to(kind) for kind in DTYPES),
        torch.arange(12.0).reshape(3, 4)[:, 1],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(1.5),
        torch.zeros(0, 2),
    ],
)
def test_a_tensor_of_any_kind_comes_back_from_its_form(tensor: torch.Tensor) -> None:
    others = [torch.tensor(True), torch.arange(3, dtype=torch.uint8)]
    values = [others[0], tensor, others[1]]
    _, *found = RememberedValues.of_form(form_of([1, *values])).put_back(None)
    for each, value in zip(found, values, strict=True):
        assert (each.dtype, each.shape) == (value.dtype, value.shape)
        assert each.tolist() == value.tolist()


def test_a_tensor_of_another_shape_comes_back_on_the_device_that_is_there() -> None:
    there = torch.ones(2, device="meta")  # As on a GPU.
    found = RememberedValues.of_form(form_of(torch.ones(3))).put_back(there)
    assert (found.device.type, found.shape) == ("meta", (3,))


@pytest.mark.parametrize(
    ("noted", "saved", "now", "shown"),
    [
        ({"rate": 2}, {"rate": 2}, {"rate": 5}, {"rate": 5}),
        ({"rows": [1]}, {"rows": [1, 2]}, {"rows": []}, {"rows": []}),
        ({"rows": [1]}, {"rows": [1, 2]}, {"rows": (1, 2)}, {"rows": (1, 2)}),
        ({}, {}, {"new": 3}, {"new": 3}),
        ({"b": 1}, {"b": 2}, {}, {}),
        ({"gone": 1}, {}, {}, {"gone": 1}),
        ({1: 2}, {1: 3}, {"1": 3}, {"1": 3}),
    ],
)
def test_what_is_otherwise_than_it_was_saved_stays(
    noted: Any, saved: Any, now: Any, shown: Any
) -> None:
    now = {"n": 2, **now}
    form = without(*map(form_of, ({"n": 1, **noted}, {"n": 2, **saved}, now)))
    assert RememberedValues.of_form(form).put_back(now) == {"n": 1, **shown}
