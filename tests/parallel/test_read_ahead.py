"""Prefetchers of a program's own, which would lose a batch at a stop, are told so."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    ElasticRunError,
    remaining_epochs_until,
)
from tests.support.data import Numbers
from tests.support.stage import wait_until

pytestmark = pytest.mark.usefixtures("job")


class DataPrefetcher:
    """NVIDIA's, without its stream."""

    def __init__(self, loader: Any) -> None:
        self.loader = iter(loader)
        self.preload()

    def preload(self) -> None:
        try:
            self.next_input = next(self.loader)
        except StopIteration:
            self.next_input = None

    def next(self) -> Any:
        batch = self.next_input
        self.preload()
        return batch


def by_nvidia(loader: Any) -> Iterator[Any]:
    prefetcher = DataPrefetcher(loader)
    batch = prefetcher.next()
    while batch is not None:
        yield batch
        batch = prefetcher.next()


def by_timm(loader: Any) -> Iterator[Any]:
    batch, first = None, True
    for following in loader:
        if not first:
            yield batch
        first = False
        batch = following
    yield batch


def by_hand(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def by_thread(loader: Any) -> Iterator[Any]:
    batches: queue.Queue[Any] = queue.Queue(1)

    def put_all() -> None:
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=put_all, daemon=True).start()
    first = batches.get()
    wait_until(batches.full)  # Which is what such a thread is for.
    yield first
    yield from iter(batches.get, None)


class Training:
    """A model, and how it is trained with a batch."""

    def __init__(self, name: str = "model", most: int | None = None) -> None:
        net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.model = AdaptiveDataParallel(net, self.optimizer, name=name)
        self.loader = AdaptiveDataLoader(Numbers(9), 2, max_local_batch_size=most)

    def step(self, batch: Any) -> None:
        x = batch.float().view(-1, 1) / 9
        self.optimizer.zero_grad()
        mse_loss(self.model(x), x).backward()
        self.optimizer.step()

    def run(self, ahead: Any) -> None:
        for _ in remaining_epochs_until(2):
            for batch in ahead(self.loader):
                self.step(batch)


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("ahead", [by_nvidia, by_timm, by_hand])
def test_a_batch_that_is_asked_for_ahead_is_told(ahead: Any, most: int | None) -> None:
    training = Training(most=most)
    message = r"behind the loop \(test_read_ahead\.py:\d+\) whose first batch had none"
    with pytest.warns(UserWarning, match=message):
        training.run(ahead)


def test_a_loop_in_another_thread_is_refused() -> None:
    training = Training()
    with pytest.raises(ElasticRunError, match="runs in another thread than the train"):
        training.run(by_thread)


class Slow(Numbers):
    """Samples of which the third one takes until it is let go."""

    def __init__(self) -> None:
        super().__init__(9)
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.is_asked.set()
            self.goes_on.wait()
        return index


def test_so_is_one_that_waits_for_its_second_batch() -> None:
    training, data = Training(), Slow()
    loader = AdaptiveDataLoader(data, 2, name="slow")
    batches: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: [*map(batches.put, loader)], daemon=True)
    thread.start()
    data.is_asked.wait()
    with pytest.raises(ElasticRunError, match="runs in another thread than the train"):
        training.step(batches.get())
    data.goes_on.set()
    thread.join()


def test_a_forward_pass_in_a_thread_that_the_body_waits_for_is_right() -> None:
    training = Training()
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in remaining_epochs_until(2):
            for number, batch in training.loader.enumerate():
                if number > 0:  # The first one is left out.
                    pool.submit(training.step, batch).result()


def test_other_training_behind_a_loop_is_not_told() -> None:
    training, other = Training(), Training("other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in remaining_epochs_until(2):
            for number, batch in training.loader.enumerate():
                training.step(batch)
                if number % 2:
                    other.step(batch)
            training.step(torch.ones(2))
            other.step(torch.ones(2))
