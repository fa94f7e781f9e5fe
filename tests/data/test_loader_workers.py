"""Workers of a loader: they change no batch, and end with what they serve."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, get_worker_info

from elasticrun import (
    AdaptiveDataLoader,
    JobStopped,
    remaining_epochs_until,
    request_stop,
)
from tests.support.data import Numbers, Workers, samples_of
from tests.support.generations import generation, run_once
from tests.support.stage import wait_until

pytestmark = [
    pytest.mark.usefixtures("job"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_change_nothing(num_workers: int) -> None:
    expected = [batch.tolist() for batch in AdaptiveDataLoader(Numbers(23), 4, True)]
    with generation():
        loader = AdaptiveDataLoader(Numbers(23), 4, True, num_workers=num_workers)
        assert [batch.tolist() for batch in loader] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.wide)]
)
def test_workers_start_by_any_method_and_resume(tmp_path: Path, method: str) -> None:
    delivered: list[int] = []

    def script() -> None:
        loader = AdaptiveDataLoader(
            Workers(12),
            2,
            num_workers=1,
            multiprocessing_context=method,
            persistent_workers=True,
        )
        for samples, pids in loader:
            assert set(pids.tolist()).isdisjoint({-1, os.getpid()})
            delivered.extend(samples.tolist())
            if len(delivered) == 4:
                request_stop()

    run_once(script, tmp_path)
    assert delivered == list(range(4))
    run_once(script, tmp_path)
    assert delivered == list(range(12))


def test_persistent_workers_serve_every_loop(tmp_path: Path) -> None:
    pids: list[set[int]] = []
    delivered: list[list[int]] = []

    def script() -> None:
        loader = AdaptiveDataLoader(
            Workers(20), 2, True, num_workers=2, persistent_workers=True
        )
        for number in range(4):
            own: list[int] = []
            pids.append(set())
            for samples, workers in loader:
                own += samples.tolist()
                pids[-1] |= set(workers.tolist())
                if number == 1:
                    break  # Leaves batches behind that workers have fetched.
                if number == 2 and loader.batch_index == 3 and len(delivered) == 2:
                    request_stop()
                    delivered.append(own)
            delivered.append(own)

    run_once(script, tmp_path)
    assert len(pids[0]) == 2
    assert pids[1] < pids[0]
    assert pids[2] == pids[0]
    run_once(script, tmp_path)
    # After the resume two loops are skipped, and the third begins with its batch 4.
    first, left, third, nothing, nothing_more, rest, last = delivered
    assert nothing == nothing_more == []
    assert len(left) == 2
    for loop in (first, third + rest, last):
        assert sorted(loop) == list(range(20))
    assert pids[-1] == pids[-2]
    assert pids[-1].isdisjoint(pids[0])


def test_prefetched_batches_are_not_counted(tmp_path: Path) -> None:
    delivered: list[int] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(40), 2, num_workers=2, prefetch_factor=4)
        for batch in loader:
            delivered.extend(batch.tolist())
            if len(delivered) == 6:
                request_stop()

    run_once(script, tmp_path)
    assert delivered == list(range(6))
    run_once(script, tmp_path)
    assert delivered == list(range(40))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_persistent_workers_end_with_their_loader() -> None:
    loader = AdaptiveDataLoader(Numbers(8), 2, num_workers=2, persistent_workers=True)
    assert samples_of(loader) == list(range(8))
    assert len(multiprocessing.active_children()) == 2
    del loader
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("no_garbage_collection")
def test_workers_end_with_a_loop_whose_exception_is_kept() -> None:
    def script() -> None:
        for _ in AdaptiveDataLoader(Numbers(8), 2, num_workers=2):
            request_stop()

    with pytest.raises(JobStopped) as kept:
        script()
    assert kept.tb is not None
    assert multiprocessing.active_children() == []


class Bad(Numbers):
    def __getitem__(self, index: int) -> int:
        raise ValueError("a bad sample")


@pytest.mark.usefixtures("no_garbage_collection")
def test_workers_end_with_a_loop_whose_data_set_has_raised() -> None:
    """The traceback that torch's iterator is in may be kept by whoever tries again."""
    with pytest.raises(ValueError, match="a bad sample") as kept:
        samples_of(AdaptiveDataLoader(Bad(8), 2, num_workers=2))
    assert kept.tb is not None
    assert multiprocessing.active_children() == []


class NotesItsWorker:
    """A worker_init_fn that leaves a file for each worker, with what it found."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, worker_id: int) -> None:
        information = get_worker_info()
        assert information is not None
        found = f"{type(information.dataset).__name__} {information.num_workers}"
        (self.directory / str(worker_id)).write_text(found)


@pytest.mark.parametrize("seed_each", ["batch", "sample"])
def test_a_worker_init_function_finds_the_users_data_set(
    tmp_path: Path, seed_each: Any
) -> None:
    loader = AdaptiveDataLoader(
        Numbers(8),
        2,
        num_workers=2,
        seed_each=seed_each,
        worker_init_fn=NotesItsWorker(tmp_path),
    )
    assert samples_of(loader) == list(range(8))
    found = {path.name: path.read_text() for path in tmp_path.glob("[0-9]")}
    assert found == {"0": "Numbers 2", "1": "Numbers 2"}


class Stalls(Numbers):
    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        return index


def test_a_timeout_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # For so long torch waits for its worker before it kills it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    loader = AdaptiveDataLoader(Stalls(4), 2, num_workers=1, timeout=0.2)
    with pytest.raises(RuntimeError, match="timed out after 0.2 seconds"):
        list(loader)
    wait_until(lambda: multiprocessing.active_children() == [])


class Mixture(Numbers):
    """Sample i is i, and what the data set is set to."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


class Setup:
    """A `worker_init_fn` that sets what the worker's data set gives."""

    epoch = 0

    def __call__(self, worker_id: int) -> None:
        information = get_worker_info()
        assert information is not None
        information.dataset.dataset.epoch += self.epoch


SETUP = Setup()


def in_the_setup(data: Mixture, value: int) -> None:
    SETUP.epoch = value


@pytest.mark.parametrize("change", [Mixture.set_epoch, in_the_setup])
def test_persistent_workers_see_what_was_set_before_a_loop(
    change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(stop_in: int | None) -> list[int]:
        data, SETUP.epoch = Mixture(6), 0
        loader = AdaptiveDataLoader(
            Subset(data, range(6)),
            2,
            num_workers=1,
            persistent_workers=True,
            worker_init_fn=SETUP,
        )
        for epoch in remaining_epochs_until(3):
            change(data, epoch)
            for number, batch in loader.enumerate():
                loops.append(loader.running_loop)  # As a model would.
                assert len(multiprocessing.active_children()) == 1
                seen.append(int(batch[1][0]))
                if 3 * epoch + number == stop_in:
                    request_stop()
        return seen

    loops: list[Any] = []
    seen: list[int] = []
    run_once(lambda: script(4), tmp_path)
    run_once(lambda: script(None), tmp_path)
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    seen = []
    run_once(lambda: script(None))
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    told = [each for each in caplog.messages if "has changed since the workers" in each]
    assert len(told) == 3  # Once a generation.
    places = ("dataset.dataset.", "worker_init_fn.epoch")
    assert all(each.startswith(places) for each in told)
