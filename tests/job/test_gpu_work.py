"""Waiting for a GPU, which waits for others; torch's events are pretended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun.checkpoint.states.state import CannotRescueError
from elasticrun.errors import AgreementError
from elasticrun.job import gpu_work
from elasticrun.job.gpu_work import GpuWork
from elasticrun.testing import run_generation
from tests.job.test_not_remembered import Own


class Gpu:
    """A GPU that has done its work after some looks, or waits for ever."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.is_waiting = False
        self.is_capturing = False
        self.said: list[str] = []

    def record(self) -> None:
        self.num_looks = 0

    def query(self) -> bool:
        self.num_looks += 1
        assert self.num_looks < 10_000, "nobody looks whether another one has died"
        return not self.is_waiting and self.num_looks > 3

    def abort(self) -> None:
        self.said.append("aborted")
        self.is_waiting = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Event", lambda: gpu)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    monkeypatch.setattr(cuda, "synchronize", lambda: gpu.said.append("waited"))
    return gpu


def test_it_waits_until_the_work_is_done(gpu: Gpu) -> None:
    GpuWork(check=lambda: None, abort=gpu.abort).wait()
    assert gpu.num_looks == 4


def test_it_waits_for_nobody_who_has_died(gpu: Gpu) -> None:
    gpu.is_waiting = True

    def check() -> None:
        if gpu.num_looks == 7:
            raise AgreementError("the process of rank 1 died")

    with pytest.raises(AgreementError, match="rank 1"):
        GpuWork(check, gpu.abort).wait()
    assert gpu.said == []  # Else the work behind would be done, with any values.


@pytest.mark.parametrize("is_waiting", [False, True])
def test_it_is_known_what_was_passed_before_the_abort(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    if is_waiting:
        monkeypatch.setattr(gpu_work, "_PASSING_SECONDS", 0.01)
    work = GpuWork(check=lambda: None, abort=gpu.abort)
    mark = work.mark()
    gpu.is_waiting = is_waiting
    work.end([mark])
    assert mark.was_passed == (not is_waiting)
    assert gpu.said == ["aborted", "waited"]


def test_an_abort_that_hangs_is_no_rescue(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_work, "_ABORT_SECONDS", 0.01)
    is_over = threading.Event()

    def abort() -> None:
        is_over.wait()

    work = GpuWork(check=lambda: None, abort=abort)
    with pytest.raises(CannotRescueError, match="could not be aborted"):
        work.end([])
    is_over.set()
    assert gpu.said == []


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_in_a_graph_is_no_rescue(gpu: Gpu, is_compiled: bool) -> None:
    work = GpuWork(check=lambda: None, abort=gpu.abort)

    def step(gradient: torch.Tensor) -> torch.Tensor:
        work.wait()
        return gradient + 1

    gpu.is_capturing = not is_compiled
    if is_compiled:
        step = torch.compile(step, backend="eager", fullgraph=True)
    step(torch.zeros(1))
    with pytest.raises(CannotRescueError, match="CUDA graph"):
        work.mark()


def what_waiting_costs(directory: str) -> tuple[bool, str, float]:
    """Train on a pretended GPU and clock; return whether the rescue is off, and why.

    Behind the reduction and before the step it waits for 2 s; behind each of these rank
    0 takes 0.08 s and rank 1 takes 0.02 s, of 10 s in all. Return also how long a step
    waits where each replica has a part of a state.
    """
    now = [0.0]

    class Event(Gpu):
        def query(self) -> bool:
            now[0] += 0.5
            return super().query()

    gloo = dist.get_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        elasticrun.init(directory, save_interval="off")
        job = elasticrun.current_job()
        patch.setattr(dist, "get_backend", gloo)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = elasticrun.AdaptiveDataParallel(net, optimizer)
        data = TensorDataset(torch.ones(2 * 72, 4))
        for (rows,) in elasticrun.AdaptiveDataLoader(data, 2):
            now[0] += 6.0
            model(rows).sum().backward()
            now[0] += (0.08, 0.02)[job.rank]
            optimizer.step()
            now[0] += (0.08, 0.02)[job.rank]
        assert job.rescue is not None
        told = job.rescue.is_off, job.rescue.why_not
        Own("own")
        for (rows,) in elasticrun.AdaptiveDataLoader(data, 48):
            before = now[0]
            model(rows).sum().backward()
            optimizer.step()
        return *told, now[0] - before


@pytest.mark.slow
def test_a_rescue_is_on_where_waiting_costs_a_hundredth_of_a_step_at_most(
    tmp_path: Path,
) -> None:
    assert run_generation(what_waiting_costs, 2, str(tmp_path)) == [
        (True, "steps are too short (set ELASTICRUN_RESCUE=always)", 0.0),
        (False, "", 0.0),
    ]
