"""What keeps a boundary from being remembered is noticed, and named."""

from __future__ import annotations

import dataclasses
import io
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import elasticrun
from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    State,
    Variables,
    register,
)
from elasticrun.checkpoint.states.state import CannotRescueError
from elasticrun.job.current import current_job
from elasticrun.job.rescue import remember
from elasticrun.testing import Job, run_generation
from tests.job.test_remembering import Counted, saved, state_called

Change = Callable[[], Any]
TOO_MANY = "'variables' has more values than are copied at each boundary ('rows')"
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def test_a_changed_parameter_is_noticed(job: Job) -> None:
    net = nn.Linear(2, 2)
    register(net=net)
    state = state_called("net")
    remember(state)()
    put_back = remember(state)
    net.weight.detach().add_(1)
    with pytest.raises(CannotRescueError, match="parameters of 'net' have changed"):
        put_back()
    put_back = remember(state)
    net.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(CannotRescueError, match="parameters of 'net' have changed"):
        put_back()


def halve_in_place(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.5)


def halve_by_assignment(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("halve", [halve_in_place, halve_by_assignment])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_average_that_changes_through_data_is_noticed(
    job: Job, halve: Callable[[torch.Tensor], None], layout: torch.memory_format
) -> None:
    """As momentum encoders do in the forward pass, which torch does not count."""
    key = nn.Conv2d(2, 2, 3, bias=False).requires_grad_(False)
    register(key=key.to(memory_format=layout))
    put_back = remember(state_called("key"))
    halve(key.weight)
    with pytest.raises(CannotRescueError, match="parameters of 'key' have changed"):
        put_back()


def test_a_buffer_is_noticed_that_changes_where_nobody_looks(job: Job) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("queue", torch.zeros(10_000))
    net.register_buffer("small", torch.zeros(100))
    register(net=net)
    put_back = remember(state_called("net"))
    net.get_buffer("small").data[50] = 1.0
    put_back()
    assert net.get_buffer("small")[50] == 0
    net.get_buffer("queue").data[50] = 1.0
    with pytest.raises(CannotRescueError, match="buffers of 'net' have changed"):
        put_back()


def test_buffers_and_parameters_may_move(job: Job) -> None:
    """As when they are sent to another process."""
    net = nn.BatchNorm1d(100_000)
    register(net=net)
    remember(state_called("net"))
    net.share_memory()
    put_back = remember(state_called("net"))
    before = saved([state_called("net")])
    net(torch.randn(2, 100_000))
    put_back()
    assert saved([state_called("net")]) == before
    net.get_buffer("running_mean").resize_(5)
    with pytest.raises(CannotRescueError, match="buffers of 'net' change their shapes"):
        remember(state_called("net"))


def test_large_tensors_of_a_programs_own_are_looked_at(job: Job) -> None:
    values = Variables(name="own", tensor=torch.ones(5000))
    put_back = remember(state_called("own"))
    put_back()
    values.tensor.data.mul_(2)
    with pytest.raises(CannotRescueError, match="more of 'own' has changed since"):
        put_back()


def test_no_boundary_is_kept_while_gradients_wait(job: Job) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    register(net=net)
    state = state_called("net")
    for _ in range(2):
        for _ in range(2):
            net(torch.randn(2, 2)).sum().backward()
            for _ in range(2):  # A loop without gradients, too, has boundaries.
                with pytest.raises(CannotRescueError, match="gradients of 'net' wait"):
                    remember(state)()
        optimizer.step()
        put_back = remember(state)
        remember(state)()
        before = saved([state])
        net(torch.randn(2, 2)).sum().backward()
        remember(state)
        put_back()  # To the last step.
        assert saved([state]) == before
        optimizer.zero_grad()
        remember(state)()


def test_a_module_that_saves_in_a_way_of_its_own_cannot_be_remembered(job: Job) -> None:
    class Counting(nn.Module):
        count = 0

        def _save_to_state_dict(self, values: Any, prefix: str, keep: bool) -> None:
            values[prefix + "count"] = torch.tensor(self.count)

    register(net=nn.Sequential(nn.Linear(2, 2), Counting()))
    with pytest.raises(CannotRescueError, match="Counting in 'net' has a way of its"):
        remember(state_called("net"))


def test_what_decides_batch_sizes_keeps_nobody_from_a_rescue(job: Job) -> None:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    AdaptiveDataParallel(net, own, measure_noise=True)
    AdaptiveDataLoader(range(10), 2).autoscale(8)
    for state in current_job().states:
        remember(state)()


def test_a_module_elsewhere_than_on_the_cpu_cannot_be_remembered(job: Job) -> None:
    register(net=(net := nn.Linear(2, 2)))
    net.to("meta")
    with pytest.raises(CannotRescueError, match="whether a Parameter of 'net' changes"):
        remember(state_called("net"))


class Conjugate:
    def state_dict(self) -> dict[str, Any]:
        return {"waves": torch.zeros(4000, dtype=torch.complex64).conj()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_conjugate_of_a_programs_own_is_named(job: Job) -> None:
    register(own=Conjugate())
    with pytest.raises(CannotRescueError, match="waves"):
        remember(state_called("own"))


ODD = {
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_job_with_a_buffer_of_a_rare_kind_trains_without_a_rescue(
    kind: str, tmp_path: Path
) -> None:
    def script() -> tuple[int, str | None]:
        net = nn.Linear(1, 1)
        net.register_buffer("odd", ODD[kind](), persistent=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.state["num_calls"] = 0  # type: ignore[assignment, index]
        register(net=net, optimizer=optimizer)
        for _ in AdaptiveDataLoader(range(8), batch_size=2):
            optimizer.zero_grad()
            net.weight.sum().backward()
            optimizer.step()
            optimizer.state["num_calls"] += 1  # type: ignore[index, operator]
        calls: Any = optimizer.state["num_calls"]
        return calls, current_job().why_no_rescue

    variables = {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path)}
    for calls, why in run_generation(script, 2, variables=variables):
        assert calls == 4
        assert "nothing tells whether a Tensor of 'net' changes" in why


def test_a_metric_that_is_updated_since_is_noticed(job: Job) -> None:
    register(metric=(metric := torchmetrics.SumMetric()))
    state = state_called("metric")
    put_back = remember(state)
    put_back()
    metric.update(1.0)
    with pytest.raises(CannotRescueError, match="each replica has a part"):
        put_back()


def test_a_momentum_that_was_dropped_is_noticed(job: Job) -> None:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    register(optimizer=own)
    net(torch.ones(2)).sum().backward()
    own.step()
    put_back = remember(state_called("optimizer"))
    own.state.clear()
    with pytest.raises(CannotRescueError, match="'optimizer' has other groups or"):
        put_back()


def test_a_state_without_attributes_cannot_be_remembered(job: Job) -> None:
    class Elsewhere(State):
        def save(self, fileobj: Any) -> None:
            """Write what is a global of the program."""

        def load(self, fileobj: Any) -> None:
            """Read it."""

    with pytest.raises(CannotRescueError, match="what 'elsewhere' saves is elsewhere"):
        remember(Elsewhere("elsewhere"))


def test_values_that_are_not_plain_are_named_at_the_first_boundary(job: Job) -> None:
    class Holder(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(1)

    with pytest.raises(
        CannotRescueError, match=r"'Holder' has a Generator \('generator'\)"
    ):
        remember(Holder())


# Values of a state that take long to copy, each with where it becomes too much.
LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [0.5] * 70_000, "large"),
    "tuple": (lambda: (0.5,) * 1_000_000, "large"),
    "set": (lambda: set(range(1_000_000)), "large"),
    "deque": (lambda: deque(range(1_000_000)), "large"),
    "dict": (lambda: dict.fromkeys(range(1_000_000)), "large"),
    "lists": (lambda: [[0.5] * 60_000] * 100, "large.1"),
    "short lists": (lambda: {each: [0] * 100 for each in range(10_000)}, "large"),
    "a bit nested": (lambda: [[[0] * 100] * 100] * 100, r"large.\d.\d+"),
    "tuples in a set": (lambda: {(each, 0) for each in range(10_000)}, "large"),
    "objects": (lambda: [Best(0.5, 1) for _ in range(10_000)], "large"),
    "tensors": (lambda: [torch.ones(1)] * 10_000, "large"),
    "arrays": (lambda: [np.ones(1)] * 10_000, "large"),
}


@dataclasses.dataclass
class Best:
    loss: float
    at: int


@pytest.mark.parametrize("name", LARGE)
def test_values_that_take_long_to_copy_are_named_before_they_are(
    job: Job, name: str
) -> None:
    make, path = LARGE[name]
    holder = Counted()
    put_back = remember(holder)
    holder.history = {"large": make(), "next": [1]}
    with pytest.raises(
        CannotRescueError,
        match=rf"'Counted' has more values .* \('history.{path}'\): .*rescue=False",
    ):
        remember(holder)
    put_back()
    assert holder.history["losses"] == [1.0]
    remember(holder)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [np.float64(0.5)] * 60_000,
        lambda: tuple(range(60_000)),
        lambda: set(range(60_000)),
        lambda: dict.fromkeys(range(60_000), 1),
        lambda: {**dict.fromkeys(range(15_000), 1), "tensor": torch.ones(1)},
        lambda: [[0.5]] * 1_500,
        lambda: [torch.ones(10)] * 300,
    ],
)
def test_many_values_come_back(job: Job, make: Callable[[], Any]) -> None:
    holder = Counted()
    holder.history = {"many": make()}
    put_back = remember(holder)
    before, holder.history["many"] = holder.history["many"], None
    put_back()
    assert holder.history["many"] is before


def reasons(directory: str) -> list[str]:
    """Return why there is no rescue, at each boundary of a list that grows."""
    elasticrun.init(directory, save_interval="off")
    values = Variables(rows=[])
    why = []
    lengths = iter([30_000, 60_000, 70_000, 10, 20])
    for _ in AdaptiveDataLoader(range(10), 2):
        why.append(current_job().why_no_rescue)
        values.rows = [0] * next(lengths)
    return why


def test_a_list_that_grows_ends_the_rescue_while_it_is_too_long(tmp_path: Path) -> None:
    for *before, too_long, after in run_generation(reasons, 2, str(tmp_path)):
        assert too_long.startswith(TOO_MANY)
        assert [*before, after] == ["", "", "", ""]


class Buffer:
    """Whose state takes long to read; as `time.perf_counter` is pretended to tell."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.now, self._seconds, self.num_read = 0.0, seconds, 0

    def state_dict(self) -> dict[str, Any]:
        self.now += self._seconds()
        self.num_read += 1
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def read(
    directory: str, seconds: list[float], rescue: bool | str
) -> tuple[str, bool, int]:
    """Read a buffer in a step of one second; return why there is no rescue.

    Return also whether it is off, and how often the buffer was read.
    """
    elasticrun.init(directory, save_interval="off", rescue=rescue)
    left = iter(seconds)
    buffer = Buffer(lambda: next(left, seconds[-1]))
    Variables(name="small", rows=[1])
    register(buffer=buffer)
    rescue_of = current_job().rescue
    assert rescue_of is not None
    buffer.num_read = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: buffer.now)
        for _ in AdaptiveDataLoader(range(60), 2):
            buffer.now += 1.0
        return rescue_of.why_not, rescue_of.is_off, buffer.num_read


@pytest.mark.parametrize(
    ("seconds", "rescue", "is_off"),
    [
        ([*[0.04] * 9, 0.06], True, True),  # It has grown.
        ([0.06, 0.06, 0.06, 0.04] * 9, True, False),  # The machine is busy.
        ([0.06], "always", False),
    ],
)
def test_a_state_that_takes_long_to_read_is_named_and_read_no_more(
    tmp_path: Path, seconds: list[float], rescue: bool | str, is_off: bool
) -> None:
    told = run_generation(read, 2, str(tmp_path), seconds, rescue)
    for why, was_off, num_read in told:
        assert was_off == is_off
        assert why.startswith("'buffer' takes too long") == is_off, why
        assert (num_read < 25) == is_off


def said_of_boundaries(directory: str, share: float) -> list[str]:
    """Return what is said of boundaries that take a share of steps of 10 ms."""
    elasticrun.init(directory, save_interval="off")
    buffer = Buffer(lambda: 0.01 * share)
    register(buffer=buffer)
    said = io.StringIO()
    logger = logging.getLogger("elasticrun")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(said))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: buffer.now)
        for _ in elasticrun.remaining_steps_until(1200):
            buffer.now += 0.01 * (1 - share)
    lines = said.getvalue().splitlines()
    return [each for each in lines if "death of another replica" in each]


@pytest.mark.parametrize("share", [0.2, pytest.param(0.03, marks=pytest.mark.slow)])
def test_what_boundaries_take_of_short_steps_is_said_once(
    tmp_path: Path, share: float
) -> None:
    said, not_said = run_generation(said_of_boundaries, 2, str(tmp_path), share)
    assert not_said == []  # Rank 0 says it for all.
    assert len(said) == (share > 0.05)
    for each in said:
        assert "takes 20 % of the time (2 of 10 ms a boundary): init(rescue" in each


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


class Own(State):
    """What each replica has of its own, so that nobody can save it alone."""

    is_per_replica = True

    def save(self, fileobj: Any) -> None:
        pass

    def load(self, fileobj: Any) -> None:
        pass


def on_at_boundaries(directory: str) -> list[bool]:
    elasticrun.init(directory, rescue="always")
    Own("own")
    rescue = elasticrun.current_job().rescue
    assert rescue is not None
    loader = AdaptiveDataLoader(range(4), 2)
    return [rescue.is_on, *(rescue.is_on for _ in loader)]


@pytest.mark.slow
def test_a_survivor_may_say_why_there_is_no_rescue(tmp_path: Path) -> None:
    """So a launcher waits for one, from the first boundary on."""
    expected = [False, False, True]
    assert run_generation(on_at_boundaries, 2, str(tmp_path)) == [expected] * 2
