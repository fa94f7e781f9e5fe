"""With virtual replicas a job ends with the same bits at any number of processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def fail_twice(is_left_out: bool) -> tuple[float, str]:
    """Have backward passes end in exceptions, before anything is sent and behind it."""
    torch.set_num_threads(1)
    elasticrun.init(virtual_replicas=2)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer, bucket_cap_mb=1e-4)
    train = AdaptiveDataLoader(torch.randn(12, 4), 4)
    stepped = 0.0
    try:
        for x in train:
            optimizer.zero_grad()
            loss = model(x).mean()
            hook = net[2 - 2 * train.batch_index].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            hook.remove()
            if train.batch_index == 1 and is_left_out:
                continue
            loss.backward()
            optimizer.step()
            stepped = sum(float(each.sum()) for each in net.parameters())
    except ElasticRunError as error:
        return stepped, str(error)
    return stepped, "no error"


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_failed_backward_pass_is_tried_again_unless_it_has_sent(
    is_left_out: bool,
) -> None:
    one, other = run_generation(fail_twice, 2, is_left_out, timeout=TIMEOUT)
    assert one == other
    stepped, error = one
    assert stepped != 0.0
    assert "went on after a backward pass had ended in an exception" in error


def train_towers(num_virtual: int | None) -> list[float]:
    """Freeze each of two towers in turn, and reach first the one that a share says."""
    torch.set_num_threads(1)
    if num_virtual is not None:
        elasticrun.init(virtual_replicas=num_virtual)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    models = [
        AdaptiveDataParallel(net, optimizer, name=name)
        for net, optimizer, name in zip(nets, optimizers, "ab", strict=True)
    ]
    parts = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    parts.forward = lambda x: parts["head"](parts["body"](x))
    last = torch.optim.SGD(parts.parameters(), lr=0.1)
    model = AdaptiveDataParallel(parts, last, name="c", bucket_cap_mb=1e-4)
    generator = torch.Generator().manual_seed(1)
    for x in AdaptiveDataLoader(torch.randn(27, 4, generator=generator), 9):
        by_sign = 1 if x[0, 0] > 0 else -1
        outputs = [each(x) for each in models[::by_sign]][::by_sign]
        (outputs[0].square().mean() + (outputs[1] - 1).square().mean()).backward()
        for frozen in parts.values():
            frozen.requires_grad_(False)
            model(x).square().mean().backward()
            frozen.requires_grad_(True)
        whole = model(x).mean()
        parts["body"].requires_grad_(False)
        headed = model(x).mean()
        parts["body"].requires_grad_(True)
        (whole + headed).backward()
        for optimizer in (*optimizers, last):
            optimizer.step()
            optimizer.zero_grad()
    return [float(p.detach().sum()) for net in (*nets, parts) for p in net.parameters()]


def test_towers_come_to_what_they_come_to_without_virtual_replicas() -> None:
    (plain,) = run_generation(train_towers, 1, None, timeout=TIMEOUT)
    (alone,) = run_generation(train_towers, 1, 4, timeout=TIMEOUT)
    assert alone == pytest.approx(plain, abs=1e-5)
    assert run_generation(train_towers, 2, 4, timeout=TIMEOUT) == [alone] * 2


class Checkpointed(nn.Sequential):
    """Computes its last layer again, in a backward pass within the backward pass."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self[1], self[0](x), use_reentrant=True)


def train_some_towers(num_passes: int, kind: Any = nn.Sequential) -> list[float]:
    """Train the second tower with the last share, and some of the others."""
    torch.set_num_threads(1)
    elasticrun.init(virtual_replicas=4)
    torch.manual_seed(0)
    nets = [kind(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Linear(4, 2)]
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
    first, second = (
        AdaptiveDataParallel(net, optimizer, name=name)
        for net, optimizer, name in zip(nets, optimizers, "ab", strict=True)
    )
    generator = torch.Generator().manual_seed(1)
    train = AdaptiveDataLoader(torch.randn(64, 4, generator=generator), 8)
    for x in train:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [first(x).square().mean()]
        if x[0, 0] > 0 or train.running_loop.current.part.share == 3:
            losses.append(second(x).square().mean())
        if num_passes == 1:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [float(p.detach().sum()) for net in nets for p in net.parameters()]


def test_a_model_may_have_no_gradient_in_some_shares() -> None:
    (alone,) = run_generation(train_some_towers, 1, 1, timeout=TIMEOUT)
    assert run_generation(train_some_towers, 1, 2, timeout=TIMEOUT) == [alone]
    assert run_generation(train_some_towers, 3, 1, timeout=TIMEOUT) == [alone] * 3
    found = run_generation(train_some_towers, 2, 1, Checkpointed, timeout=TIMEOUT)
    assert found == [alone] * 2


def test_backward_passes_that_some_shares_leave_out_are_refused() -> None:
    with pytest.raises(GenerationFailed) as failed:
        run_generation(train_some_towers, 2, 2, timeout=TIMEOUT)
    text = str(failed.value)
    assert text.count("ElasticRunError: processes have called backward()") == 2
    assert "has ended, elsewhere another one" in text


def look_at_inputs() -> list[float]:
    """Return gradients of inputs alone, as for saliency maps."""
    torch.set_num_threads(1)
    elasticrun.init(virtual_replicas=2)
    net = nn.Linear(4, 1)
    model = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net.requires_grad_(False)
    sums = []
    for x in AdaptiveDataLoader(torch.ones(8, 4), 8):
        model(x.requires_grad_()).sum().backward()
        sums.append(float(x.grad.sum()))
    return sums


def test_a_model_whose_parameters_are_all_frozen_has_gradients_of_inputs() -> None:
    one, other = run_generation(look_at_inputs, 2, timeout=TIMEOUT)
    assert one == other != []
