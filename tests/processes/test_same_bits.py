"""With virtual replicas a job ends with the same bits at any number of processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, ElasticRunError
from elasticrun.errors import STOPPED
from elasticrun.testing import GenerationFailed, run_generation, start_generation
from tests.support.same_bits import LAST, train_all
from tests.support.same_ways import train_in_each_way

pytestmark = pytest.mark.slow

TIMEOUT = 300.0


@pytest.fixture(scope="module")
def calm() -> Any:
    """Return what one process comes to, without workers or an interruption."""
    (found,) = run_generation(train_all, 1, timeout=TIMEOUT)
    return found


@pytest.mark.parametrize(("size", "num_workers"), [(2, 1), (3, 2), (4, 0)])
def test_any_number_of_processes_and_workers_ends_alike(
    calm: Any, size: int, num_workers: int
) -> None:
    found = run_generation(train_all, size, None, num_workers, timeout=TIMEOUT)
    assert found == [calm] * size


def test_a_job_that_is_rescaled_and_killed_ends_alike(
    calm: Any, tmp_path: Path
) -> None:
    directory = str(tmp_path)
    stops = {1: (0, LAST), 3: (1, 0), 2: (1, 3)}
    for size, stop_at in stops.items():
        with start_generation(_stopped, size, directory, stop_at, None) as started:
            outcomes = started.wait(timeout=TIMEOUT)
        assert [each.exit_code for each in outcomes] == [STOPPED] * size
    with start_generation(_stopped, 4, directory, None, (2, 1)) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[-1].exit_code == -9
    assert run_generation(train_all, 4, directory, timeout=TIMEOUT) == [calm] * 4


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_random_numbers_stops_and_kills_end_alike(
    calm: Any, tmp_path: Path, seed: int
) -> None:
    chosen, directory = random.Random(seed), str(tmp_path)
    places = [(epoch, batch) for epoch in range(3) for batch in (0, 1, 2, 3, LAST)]
    for turn in range(5):  # Some batches apart: a stop may come a boundary later.
        place = places[3 * turn + chosen.randrange(2)]
        size, is_killed = chosen.randint(1, 4), chosen.random() < 0.5
        at = (None, place) if is_killed else (place, None)
        with start_generation(_stopped, size, directory, *at) as started:
            outcomes = started.wait(timeout=TIMEOUT)
        assert outcomes[-1].exit_code == (-9 if is_killed else STOPPED), outcomes
    size = chosen.randint(1, 4)
    assert run_generation(train_all, size, directory, timeout=TIMEOUT) == [calm] * size


def _stopped(directory: str, stop_at: Any, kill_at: Any) -> Any:
    return train_all(directory, stop_at=stop_at, kill_at=kill_at)


@pytest.mark.parametrize(
    "sizes", [(1, 3), pytest.param((2, 4), marks=pytest.mark.wide)]
)
def test_each_way_to_train_ends_alike(sizes: tuple[int, int]) -> None:
    one, other = (run_generation(train_in_each_way, n, timeout=TIMEOUT) for n in sizes)
    for found in one + other:
        assert found == one[0]


def test_more_processes_than_virtual_replicas_are_refused() -> None:
    with pytest.raises(GenerationFailed, match="5 replicas, but virtual_replicas=4"):
        run_generation(train_all, 5, timeout=TIMEOUT)


def fail_once(is_tried_again: bool) -> str | list[float]:
    """Have a backward pass end in an exception behind what it has sent."""
    torch.set_num_threads(1)
    elasticrun.init(virtual_replicas=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer, bucket_cap_mb=1e-4)
    train = AdaptiveDataLoader(torch.randn(12, 4), 4)
    for x in train:
        optimizer.zero_grad()
        if train.batch_index == 0:  # Before anything is sent.
            hook = net[2].weight.register_hook(lambda _: 1 / 0)
            loss = model(x).mean()
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            hook.remove()
            loss.backward()
            optimizer.step()
            continue
        if train.batch_index == 1:
            hook = net[0].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x).mean().backward()
            hook.remove()
            if not is_tried_again:
                continue
        try:
            model(x).mean().backward()
        except ElasticRunError as error:
            return str(error)
        optimizer.step()
    return [float(parameter.sum()) for parameter in net.parameters()]


def test_what_a_failed_backward_pass_has_sent_is_not_added_to() -> None:
    one, other = run_generation(fail_once, 2, True, timeout=TIMEOUT)
    assert "another backward pass began after one had ended in an exception" in one
    assert one == other
    one, other = run_generation(fail_once, 2, False, timeout=TIMEOUT)
    assert isinstance(one, list)
    assert one == other
