"""Virtual replicas in one process: what a plain loop over the shares comes to."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    ElasticRunError,
    JobStopped,
    LoopOrderError,
    rank,
    register,
    remaining_epochs_until,
    remaining_steps_until,
    request_stop,
)
from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.generators import seed_generators
from elasticrun.data.order.plan import loop_key
from elasticrun.data.order.shares import partition
from elasticrun.testing import Job
from tests.support import numbered_streams
from tests.support.data import Numbers
from tests.support.generations import generation, run_once

NUM_SHARES, BATCH, NUM_SAMPLES = 4, 9, 25


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Job]:
    with generation(tmp_path, virtual_replicas=NUM_SHARES) as job:
        yield job


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3)
    )


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator)
    return TensorDataset(x, torch.arange(NUM_SAMPLES) % 3)


def drawn() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def plain() -> tuple[dict[str, Tensor], list[Any]]:
    """Train each share by itself, with nothing of elasticrun's around it."""
    net, (x, y), draws = network(), samples().tensors, []
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for batch, begin in enumerate(range(0, NUM_SAMPLES - BATCH + 1, BATCH)):
        before = [each.clone() for each in net.buffers()]
        kept: list[Tensor] = []
        gradients = []
        for share in range(NUM_SHARES):
            seed_generators(derive_seed(loop_key(0, 0, 0), 3, batch, share))
            own = partition(range(begin, begin + BATCH), share, num_parts=NUM_SHARES)
            for buffer, value in zip(net.buffers(), before, strict=True):
                buffer.copy_(value)
            optimizer.zero_grad()
            cross_entropy(net(x[list(own)]), y[list(own)]).backward()
            draws.append(drawn())
            kept = kept or [each.clone() for each in net.buffers()]
            weight = len(own) * NUM_SHARES / BATCH
            gradients.append([p.grad * torch.tensor(weight) for p in net.parameters()])  # type: ignore[operator]
        for buffer, value in zip(net.buffers(), kept, strict=True):
            buffer.copy_(value)
        for p, a, b, c, d in zip(net.parameters(), *gradients, strict=True):
            p.grad = ((a + b) + (c + d)) / NUM_SHARES
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    seed_generators(derive_seed(loop_key(0, 0, 0), 3, batch, NUM_SHARES))
    return net.state_dict(), [*draws, drawn()]


class Own(torch.optim.AdamW):
    """None of torch's, so it might draw in its step."""


def model_for(net: nn.Module, how: str) -> tuple[Any, list[Any]]:
    parts = [[*net.parameters()]]
    if how == "two":
        parts = [parts[0][:2], parts[0][2:]]
    kind = Own if how == "closure of own" else torch.optim.AdamW
    optimizers = [kind(part, 1e-2) for part in parts]
    model = AdaptiveDataParallel(net, optimizers)
    if how == "inner mode":
        model.eval()
        net.train()
    return model, optimizers


@torch.no_grad()
def look(model: nn.Module, x: Tensor, how: str) -> None:
    if how == "looked at":
        model(x)


def fail(loss: Tensor, weight: Any, how: str) -> None:
    if how == "tried again":
        hook = weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        hook.remove()


HOW = ["one", "two", "closure", "closure of own", "scaler", "looked at", "inner mode"]
HOW += ["tried again"]


@pytest.mark.parametrize("how", HOW)
def test_one_process_trains_as_a_plain_loop_over_the_shares(
    shared: Job, how: str
) -> None:
    expected, expected_draws = plain()
    net, draws = network(), []
    model, optimizers = model_for(net, how)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how == "scaler")
    register(scaler=scaler)
    for x, y in AdaptiveDataLoader(samples(), BATCH, drop_last=True):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fail(loss, model.module[1].weight, how)
            scaler.scale(loss).backward()
            draws.append(drawn())
            look(model, x, how)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        if how.startswith("closure"):
            optimizers[0].step(closure)
            continue
        closure()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        look(model, x, how)
    assert [*draws, drawn()] == expected_draws
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_model_may_get_another_type_between_loops(tmp_path: Path) -> None:
    def train() -> Tensor:
        net = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = AdaptiveDataParallel(net, optimizer)
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            for each in net.parameters():
                nn.init.constant_(each, 0.1)
            for x, _ in AdaptiveDataLoader(samples(), 8, drop_last=True):
                optimizer.zero_grad()
                model(x.to(dtype)).square().mean().backward()
                optimizer.step()
        return net.weight.detach()

    with generation(tmp_path / "plain"):
        expected = train()
    with generation(tmp_path / "shared", virtual_replicas=NUM_SHARES):
        assert torch.allclose(train(), expected, rtol=1e-12, atol=0.0)


def test_gradients_of_the_batch_before_wait_for_a_step_without_others(
    shared: Job,
) -> None:
    net = nn.ModuleDict({"often": nn.Linear(5, 3), "seldom": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    before = net["seldom"].weight.detach().clone()
    (x, y), layers = samples().tensors, [*net.values()]
    net.forward = lambda x, num: sum(each(x) for each in layers[:num])  # type: ignore[method-assign]
    cross_entropy(net(x[:BATCH], 2), y[:BATCH]).backward()
    expected = before - net["seldom"].weight.grad
    optimizer.zero_grad()
    model = AdaptiveDataParallel(net, optimizer)
    train = AdaptiveDataLoader(samples(), BATCH)
    for x, y in train.batches(2):
        cross_entropy(model(x, 2 - train.batch_index), y).backward()
        if train.batch_index:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(net["seldom"].weight.detach(), expected)


def test_shares_without_samples_are_left_out(shared: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(11), 9, max_local_batch_size=2)
    found = [(batch.tolist(), loader.running_loop.current.part) for batch in loader]
    assert [batch for batch, _ in found] == [
        *([0, 1], [2], [3], [4], [5], [6], [7], [8]), *([9], [10])
    ]  # fmt: skip
    assert [part.share for _, part in found] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 1]
    assert [part.is_step for _, part in found].count(True) == 2
    assert sum(part.weight for _, part in found[:8]) == pytest.approx(NUM_SHARES)


def test_each_size_of_a_share_is_compiled_for_itself(shared: Job) -> None:
    """A kernel for any size, which torch makes for a second one, rounds differently."""
    kinds: list[type] = []

    def look(graph: Any, inputs: list[Any]) -> Any:
        kinds.extend(map(type, inputs))
        return graph

    net: Any = torch.compile(network(), backend=look)
    model, optimizer = model_of(net)
    for x, y in AdaptiveDataLoader(samples(), BATCH, drop_last=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.compiler.reset()
    assert kinds
    assert torch.SymInt not in kinds


def test_a_count_weighs_all_shares_of_the_batch(shared: Job) -> None:
    net, (x, y) = nn.Linear(5, 3), (each[:BATCH] for each in samples().tensors)
    loss = cross_entropy(net(x[y > 0]), y[y > 0])
    expected = torch.autograd.grad(loss, [*net.parameters()])
    model, _ = model_of(net)
    for x, y in AdaptiveDataLoader(samples(), BATCH).batches(1):
        loss = cross_entropy(model(x), y * (y > 0) - 100 * (y == 0))
        model.weigh(loss, count=(y > 0).sum()).backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_steps_leave_nothing_behind(shared: Job) -> None:
    model, optimizer = model_of(network())
    # Of 1000 shares.
    train, found = AdaptiveDataLoader(samples(), BATCH, drop_last=True), []
    for x, y in train.batches(250):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if train.is_step and train.batch_index in (20, 249):
            gc.collect()
            found.append(len(gc.get_objects()))
    assert found[1] <= found[0] + 20


# What is in a checkpoint.


def train_a_batch() -> None:
    loader = AdaptiveDataLoader(Numbers(8), 4)
    for _ in remaining_epochs_until(1):
        for _ in loader:
            request_stop()


@pytest.mark.parametrize(("before", "now"), [(4, 2), (4, None), (None, 4)])
def test_a_checkpoint_with_another_number_is_refused(
    tmp_path: Path, before: int | None, now: int | None
) -> None:
    run_once(train_a_batch, tmp_path, virtual_replicas=before)
    text = f"virtual_replicas={before}, but now it is {now}"
    with pytest.raises(CheckpointError, match=text):
        run_once(train_a_batch, tmp_path, virtual_replicas=now)


def test_kernels_have_the_threads_of_the_first_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = torch.get_num_threads()
    caplog.set_level(logging.INFO, "elasticrun")
    try:
        torch.set_num_threads(1)
        run_once(train_a_batch, tmp_path, virtual_replicas=4)
        torch.set_num_threads(2)
        with generation(tmp_path, virtual_replicas=4):
            assert torch.get_num_threads() == 1
            assert "OMP_NUM_THREADS=1" in caplog.text
            torch.set_num_threads(2)
            with pytest.raises(JobStopped):
                train_a_batch()
        assert "kernels compute with 2 threads, but with 1" in caplog.text
    finally:
        torch.set_num_threads(given)


# What is refused.


def a_stream_of_unknown_length() -> None:
    AdaptiveDataLoader(numbered_streams.Unknown(4), 2)


def a_break_in_an_earlier_share() -> None:
    for _ in AdaptiveDataLoader(Numbers(8), 4):
        break
    rank()


def a_nested_loop() -> None:
    inner = AdaptiveDataLoader(Numbers(8), 4)
    for _ in AdaptiveDataLoader(Numbers(8), 4):
        for _ in inner:
            pass


def an_optimizer_of_a_bare_module() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    register(net=net, optimizer=optimizer)
    optimizer.step()


def model_of(net: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return AdaptiveDataParallel(net, optimizer, **options), optimizer


def a_synchronized_norm() -> None:
    model_of(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)))


def measured_noise() -> None:
    model_of(network(), measure_noise=True)


def autoscale() -> None:
    AdaptiveDataLoader(Numbers(8), 4).autoscale(8)


def an_option_of_ddp() -> None:
    model_of(network(), broadcast_buffers=False)


def a_hook_of_ddp() -> None:
    model_of(network())[0].register_comm_hook(None, lambda *_: None)


def gradients_outside_of_loops() -> None:
    model_of(network())[0](torch.randn(4, 5)).sum().backward()


def gradients_in_a_loop_of_steps() -> None:
    model, _ = model_of(network())
    for _ in remaining_steps_until(2):
        model(torch.randn(4, 5)).sum().backward()


def in_a_loop(step: Callable[[Any, Any, Tensor, Tensor], Any]) -> None:
    model, optimizer = model_of(network())
    for x, y in AdaptiveDataLoader(samples(), BATCH, drop_last=True):
        step(model, optimizer, x, y)


def a_forward_pass_after_the_step() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        model(x)

    in_a_loop(step)


def gradients_clipped_between_two_passes() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    in_a_loop(step)


def a_closure_that_is_called_twice() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    net = network()
    optimizer = Twice(net.parameters(), 0.1)
    model = AdaptiveDataParallel(net, optimizer)

    for x, y in AdaptiveDataLoader(samples(), BATCH):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def a_buffer_that_grows() -> None:
    def grow(module: nn.Module, *_: Any) -> None:
        module.mask = torch.ones(len(module.mask) + 1)

    net = network()
    net.register_buffer("mask", torch.ones(1))
    net.register_forward_hook(grow)
    model, _ = model_of(net)
    for x, y in AdaptiveDataLoader(samples(), BATCH):
        cross_entropy(model(x), y).backward()


def sparse_gradients() -> None:
    model, _ = model_of(nn.Embedding(9, 2, sparse=True))
    for batch in AdaptiveDataLoader(Numbers(8), 4):
        model(batch).sum().backward()


def a_buffer_changed_before_the_step() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()
        model.module[1].running_mean.zero_()
        optimizer.step()

    in_a_loop(step)


def a_frozen_parameter_that_follows() -> None:
    """As the encoder of MoCo's keys does, in its forward pass."""

    def follow(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.keys.lerp_(module[0].weight, 0.1)

    net: Any = network()
    keys = net[0].weight.detach().clone()
    net.register_parameter("keys", nn.Parameter(keys, requires_grad=False))
    net.register_forward_hook(follow)
    model, _ = model_of(net)
    for x, y in AdaptiveDataLoader(samples(), BATCH):
        cross_entropy(model(x), y).backward()


def gradients_set_by_hand() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        parameters = [*model.parameters()]
        found = torch.autograd.grad(cross_entropy(model(x), y), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()

    in_a_loop(step)


def an_expanded_buffer() -> None:
    net = network()
    net.register_buffer("mask", torch.ones(1).expand(4))
    model_of(net)


REFUSED = {
    a_stream_of_unknown_length: (TypeError, "virtual_replicas needs to know how many"),
    a_break_in_an_earlier_share: (LoopOrderError, "left by `break` in share 0"),
    a_nested_loop: (LoopOrderError, "began in the body of another one"),
    an_optimizer_of_a_bare_module: (ElasticRunError, "that no AdaptiveDataParallel"),
    a_synchronized_norm: (ElasticRunError, "has a SyncBatchNorm"),
    measured_noise: (ElasticRunError, "the noise of gradients is to be measured"),
    autoscale: (ElasticRunError, "autoscale, which decides by measured times"),
    an_option_of_ddp: (ElasticRunError, r"broadcast_buffers=\.\.\.\) is for DDP"),
    a_hook_of_ddp: (ElasticRunError, "register_comm_hook is DDP's"),
    gradients_outside_of_loops: (ElasticRunError, "outside of any loop"),
    gradients_in_a_loop_of_steps: (ElasticRunError, "in a loop of steps"),
    a_forward_pass_after_the_step: (ElasticRunError, "after the optimizer's step"),
    gradients_clipped_between_two_passes: (ElasticRunError, "freeze this one"),
    a_closure_that_is_called_twice: (ElasticRunError, "called its closure twice"),
    a_buffer_that_grows: (ElasticRunError, "changed the shape or the number of its"),
    sparse_gradients: (ElasticRunError, "has sparse gradients"),
    a_buffer_changed_before_the_step: (ElasticRunError, "between a backward pass and"),
    a_frozen_parameter_that_follows: (ElasticRunError, "that require no gradient"),
    gradients_set_by_hand: (ElasticRunError, "no backward pass of this iteration"),
    an_expanded_buffer: (ElasticRunError, "has an expanded buffer"),
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda what: what.__name__)
def test_what_would_depend_on_the_number_of_processes_is_refused(
    shared: Job, what: Callable[[], None]
) -> None:
    error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        what()
