"""Replay is harmless: what replayed code changes of registered states is undone."""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    State,
    Variables,
    current_epoch,
    register,
    remaining_epochs_until,
    remaining_steps_until,
    request_stop,
    save_all_states,
)
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import run_once
from tests.support.one_shard import build, make_adam, train

# Changes what is registered, as code between two loops may.
Make = Callable[[], tuple[Callable[[], object], Callable[[], Any]]]
NUM_LARGE = 3000  # Values of a tensor of which no copy is kept.


class Counter(State):
    def __init__(self) -> None:
        super().__init__("counter")
        self.count, self.seen = 0, list[int]()
        self.helper = object()

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(repr([self.count, self.seen]).encode())

    def load(self, fileobj: BinaryIO) -> None:
        count, seen = fileobj.read().decode()[1:-1].split(", ", 1)
        self.count = int(count)
        self.seen[:] = map(int, filter(None, seen[1:-1].split(", ")))

    def add(self) -> None:
        self.count += 1
        self.seen.append(self.count)


def a_scheduler() -> Any:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    register(net=net, optimizer=optimizer, scheduler=scheduler)

    def step() -> None:
        optimizer.step()
        scheduler.step()

    return step, lambda: (
        scheduler.last_epoch,
        scheduler.get_last_lr(),
        optimizer.param_groups[0]["lr"],
    )


def a_wrapped_model() -> Any:
    torch.manual_seed(0)
    net = nn.Linear(NUM_LARGE, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model = AdaptiveDataParallel(net, optimizer, scheduler)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, NUM_LARGE)).sum().backward()
        optimizer.step()
        scheduler.step()

    return step, lambda: (
        net.weight.sum().item(),
        net.bias.item(),
        optimizer.param_groups[0]["lr"],
        {key: float(each.sum()) for key, each in optimizer.state[net.bias].items()},
    )


def an_average() -> Any:
    net = nn.Linear(NUM_LARGE, 1)
    nn.init.ones_(net.weight)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    register(net=net, averaged=averaged)

    def update() -> None:
        with torch.no_grad():
            net.weight.mul_(1.5)
        averaged.update_parameters(net)

    return update, lambda: (
        net.weight.sum().item(),
        averaged.module.weight.sum().item(),
        averaged.n_averaged.item(),
    )


def variables() -> Any:
    values = Variables(
        n=0,
        nan=math.nan,
        best=torch.zeros(2),
        rows=[],
        by_name={},
        large=torch.zeros(NUM_LARGE),
        array=[np.float32(0)],
    )
    rows = values.rows  # Who has it by another name has it still.

    def change() -> None:
        values.n += 1
        values.best += 1
        values.large += 1
        values.rows.append([values.n, "text"])
        rows.extend([values.n])
        values.by_name[f"epoch {values.n}"] = values.n
        values.array[0] += np.float32(0.5)

    return change, lambda: copy.deepcopy(
        (values.n, values.best.tolist(), values.large.sum().item(), values.rows,
         values.by_name, values.array)
    )  # fmt: skip


def a_state_class() -> Any:
    counter = Counter()
    return counter.add, lambda: (counter.count, list(counter.seen))


def a_metric() -> Any:
    metric = torchmetrics.SumMetric()
    register(metric=metric)
    return lambda: metric.update(1.0), lambda: metric.compute().item()


def a_plain_object() -> Any:
    class Queue:
        def __init__(self) -> None:
            self.values: collections.deque[int] = collections.deque(maxlen=3)

        def state_dict(self) -> dict[str, Any]:
            return {"values": torch.tensor(self.values), "array": list(self.values)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values.clear()
            self.values.extend(state["array"])

    queue = Queue()
    register(queue=queue)
    return lambda: queue.values.append(len(queue.values)), lambda: list(queue.values)


def a_sharded_model() -> Any:
    net = build()
    optimizer = make_adam(net)
    register(model=net, optimizer=optimizer)
    return lambda: train(net, optimizer, 1), lambda: (
        [each.full_tensor().sum().item() for each in net.parameters()],
        [
            each["exp_avg"].full_tensor().sum().item()
            for each in optimizer.state.values()
        ],
        [each.sum().item() for each in net.buffers()],
    )


KINDS = {
    kind.__name__: kind
    for kind in (
        *(a_scheduler, a_wrapped_model, an_average, variables, a_state_class),
        *(a_metric, a_plain_object, a_sharded_model),
    )
}


def between_loops(make: Make, stop_in: int, *, saves: bool = False) -> Any:
    """Change states in the epoch, between its loops, and after the epoch loop."""
    change, look = make()
    loader = AdaptiveDataLoader(Numbers(6), batch_size=2, name="train")
    valid = AdaptiveDataLoader(Numbers(4), batch_size=2, name="valid")
    seen, count = [], 0

    def body(where: str) -> None:
        nonlocal count
        seen.append((current_epoch(), where, look()))
        count += 1
        if count == stop_in:
            request_stop()

    def change_here() -> None:
        change()
        if saves:
            save_all_states()
            change()

    for _ in remaining_epochs_until(2):
        change_here()
        for _ in loader:
            body("train")
        change_here()
        for _ in valid:
            body("valid")
        change_here()
    change_here()
    for _ in loader:
        body("after")
    change_here()
    for _ in remaining_steps_until(2):
        body("steps")
    change_here()
    return seen, look()


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_at_any_batch_does_not_show(
    kind: str, saves: bool, tmp_path: Path, group: None
) -> None:
    """With `saves`, the replayed code itself saves, in the middle of its changes."""
    make = KINDS[kind]
    run = functools.partial(between_loops, make, saves=saves)
    calm, end = run_once(functools.partial(run, -1), tmp_path / "calm")
    for stop_in in range(1, len(calm)):
        directory = tmp_path / str(stop_in)
        assert run_once(functools.partial(run, stop_in), directory) is None
        seen, found = run_once(functools.partial(run, -1), directory)
        assert seen == calm[stop_in:]
        assert found == end


def test_a_chain_of_stops_does_not_show(tmp_path: Path) -> None:
    calm, end = run_once(lambda: between_loops(a_wrapped_model, -1), tmp_path / "calm")
    result, num_starts = None, 0
    while result is None:
        result = run_once(lambda: between_loops(a_wrapped_model, 2), tmp_path / "job")
        num_starts += 1
    assert result == (calm[-1:], end)
    assert num_starts == len(calm) // 2 + 1


def test_what_is_set_before_the_first_loop_wins(tmp_path: Path) -> None:
    def script(lr: float, stop_in: int) -> Any:
        net = nn.Linear(NUM_LARGE, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
        values = Variables(patience=3)
        counter = Counter()
        register(optimizer=optimizer, net=net, scheduler=scheduler)
        for group in optimizer.param_groups:
            group["lr"] = lr
        values.patience, counter.count = int(10 * lr), int(100 * lr)
        train = AdaptiveDataLoader(Numbers(4), batch_size=2)
        found = []
        for _ in remaining_epochs_until(1):
            optimizer.param_groups[0]["lr"] = 7.0
            values.patience = counter.count = -1
            for _ in train:
                pass
            with torch.no_grad():  # So that this is read again, but nothing else is.
                net.weight.add_(1)
            for number, _ in enumerate(train, 1):
                rate = optimizer.param_groups[0]["lr"]
                found.append((rate, values.patience, counter.count))
                if number == stop_in:
                    request_stop()
        return found

    assert run_once(lambda: script(0.5, 1), tmp_path) is None
    assert run_once(lambda: script(0.1, -1), tmp_path) == [(0.1, 1, 10)]


def test_an_epoch_that_an_exception_has_left_is_replayed_without_harm(job: Job) -> None:
    change, look = a_scheduler()
    train = AdaptiveDataLoader(Numbers(6), batch_size=2)

    def train_epoch(fail_at: int) -> None:
        for _ in remaining_epochs_until(1):
            for _ in train:
                pass
            change()
            for number, _ in enumerate(train):
                if number == fail_at:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_epoch(1)
    train_epoch(-1)
    assert look() == (1, [0.5], 0.5)


def test_nothing_is_read_again_where_nothing_has_changed(tmp_path: Path) -> None:
    loads = []

    class Watched(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            loads.append(1)
            return super().load_state_dict(*args, **kwargs)

    def script(stop_in: int) -> None:
        net = Watched(NUM_LARGE, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        register(net=net, optimizer=optimizer)
        train = AdaptiveDataLoader(Numbers(6), batch_size=2)
        for _ in remaining_epochs_until(2):
            for number, _ in enumerate(train, 1):
                if number == stop_in:
                    request_stop()
            net.eval()
            optimizer.zero_grad()
            for number, _ in enumerate(train, 4):
                if number == stop_in:
                    request_stop()

    run_once(lambda: script(5), tmp_path)
    run_once(lambda: script(-1), tmp_path)
    assert loads == [1]


def test_a_state_that_is_registered_late_is_shown_as_it_was(tmp_path: Path) -> None:
    def script(stop_in: int) -> Any:
        train = AdaptiveDataLoader(Numbers(6), batch_size=2)
        v: Any = None
        found = []
        for epoch in remaining_epochs_until(2):
            v = Variables(turns=0) if v is None else v
            v.turns += 1
            scale = 10 * v.turns
            for _ in train:
                found.append((epoch, scale))
                if len(found) == stop_in:
                    request_stop()
        return found

    calm = run_once(lambda: script(-1), tmp_path / "calm")
    assert run_once(lambda: script(5), tmp_path / "job") is None
    assert run_once(lambda: script(-1), tmp_path / "job") == calm[5:]


def test_an_object_is_not_shown_with_parts_of_two_moments(tmp_path: Path) -> None:
    class Total:
        """Refuses what was never there together."""

        def __init__(self) -> None:
            self.count, self.sums = 0, torch.zeros(NUM_LARGE)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "sums": self.sums.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["count"] != state["sums"][0]:
                raise ValueError("the count is of other sums")
            self.count, self.sums = state["count"], state["sums"].clone()

        def add(self) -> None:
            self.count += 1
            self.sums += 1

    def script(stop_in: int) -> Any:
        total = Total()
        register(total=total)
        train = AdaptiveDataLoader(Numbers(6), batch_size=2)
        for epoch in remaining_epochs_until(2):
            total.add()
            for number, _ in enumerate(train, 3 * epoch):
                total.add()
                if number == stop_in:
                    request_stop()
        return total.count, total.sums[-1].item()

    assert run_once(lambda: script(4), tmp_path) is None
    assert run_once(lambda: script(-1), tmp_path) == (8, 8.0)
