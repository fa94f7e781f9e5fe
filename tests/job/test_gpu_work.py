"""Waiting for a GPU, which waits for others; torch's events are pretended."""

from __future__ import annotations

import threading

import pytest
import torch

from elasticrun.checkpoint.states.state import CannotRescueError
from elasticrun.errors import AgreementError
from elasticrun.job import gpu_work
from elasticrun.job.gpu_work import GpuWork


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


def test_a_step_in_a_graph_is_no_rescue(gpu: Gpu) -> None:
    work = GpuWork(check=lambda: None, abort=gpu.abort)
    gpu.is_capturing = True
    work.wait()
    with pytest.raises(CannotRescueError, match="CUDA graph"):
        work.mark()
