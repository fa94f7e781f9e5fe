"""The step of any number of replicas is that of one on the whole global batch."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.testing import GenerationFailed, run_generation
from tests.support import losses, steps
from tests.support.data import Numbers
from tests.support.programs import request_stop_and_wait
from tests.support.steps import Case, Elastic, Torch

TIMEOUT = 300.0
WORLD_SIZES = [1, 2, 3, 4]
MAX_LOCAL_BATCH_SIZES = [None, 1, 2, 3]
ZEROED = ["before forward", "before backward", "after step"]


def named(function: Any, **options: Any) -> tuple[str, Case]:
    label = "-".join([function.__name__, *map(str, options.values())])
    return label.replace(" ", "-"), functools.partial(function, **options)


CASES: dict[str, Case] = dict(
    [
        *(
            named(steps.everything, zeroed=zeroed, by=by, set_to_none=set_to_none)
            for zeroed, by, set_to_none in itertools.product(
                ZEROED, ["optimizer", "model"], [True, False]
            )
        ),
        named(steps.everything, is_scaled=False),
        named(steps.everything, gradient_as_bucket_view=True, set_to_none=False),
        named(steps.two_adversaries),
        named(steps.gradients_after_the_step),
        named(steps.several_optimizers),
        named(steps.regularised),
        named(steps.gradients_as_values),
        *(named(steps.structured_output, kind=kind) for kind in ["tuple", "dict"]),
        named(steps.structured_output, kind="dataclass"),
        *(
            named(steps.accumulated_by_hand, zeroed=when)
            for when in ["before", "after"]
        ),
        named(steps.several_passes),
        named(steps.with_closure),
        *(named(steps.asking_for_steps, zeroed=when) for when in ["before", "after"]),
        named(steps.unused_parameters),
        named(steps.unused_parameters, gradient_as_bucket_view=True),
        named(steps.unused_parameters, looks_first=True, bucket_cap_mb=1),
        *(named(steps.left_midway, how=how) for how in ["break", "exception"]),
        *(
            named(losses.over_tokens, kind=kind)
            for kind in ["plain", "scaled", "weighted"]
        ),
        named(losses.summed),
        named(losses.weighed_and_not),
        *(named(losses.frozen_in_turns, in_turns=turns) for turns in [True, False]),
        named(losses.reading_gradients),
        named(losses.averaged_by_hand),
    ]
)
# What depends on how a batch is cut, or cannot be cut.
WHOLE: dict[str, Case] = dict(
    [
        named(losses.contrastive),
        *(named(losses.global_loss, has_gradients=has) for has in [True, False]),
        named(losses.different_means),
        *(named(losses.line_search, counts=counts) for counts in [True, False]),
    ]
)
EVERY = CASES | WHOLE


def sizes_of(label: str) -> list[int | None]:
    return [None] if label in WHOLE else MAX_LOCAL_BATCH_SIZES


def run_all_cases() -> dict[tuple[str, int | None], list[Any]]:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="a loss was computed after")
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was")
    return {
        (label, size): case(Elastic(f"{label}.{size}", size))
        for label, case in EVERY.items()
        for size in sizes_of(label)
    }


Results = list[dict[tuple[str, int | None], list[Any]]]


@functools.cache
def outcome(world_size: int) -> Results | GenerationFailed:
    try:
        return run_generation(run_all_cases, world_size, timeout=TIMEOUT)
    except GenerationFailed as failure:
        return failure


def results(world_size: int) -> Results:
    given = outcome(world_size)
    if isinstance(given, GenerationFailed):
        raise given
    return given


@functools.cache
def expected(label: str) -> list[Any]:
    return EVERY[label](Torch())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("label", EVERY)
def test_training_equals_plain_torch(label: str, world_size: int) -> None:
    for size in sizes_of(label):
        for result in results(world_size):
            torch.testing.assert_close(
                result[label, size], expected(label), rtol=1e-12, atol=1e-12
            )


class Interrupted:
    """Trains over two epochs, and stops the job once, at a given batch."""

    num_samples, batch_size = 57, 10

    def __init__(
        self, stop: tuple[int, int] | None = None, *, max_local_batch_size: int = 2
    ) -> None:
        self.stop = stop
        self.max_local_batch_size = max_local_batch_size

    def module(self) -> nn.Module:
        net = steps.network()
        net.append(nn.Linear(2, 2).double())
        return net

    def __call__(self) -> tuple[list[Tensor], float]:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        net = self.module()
        optimizer = steps.sgd(net)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        model = AdaptiveDataParallel(net, optimizer, scheduler)
        generator = torch.Generator().manual_seed(3)
        data = torch.randn(self.num_samples, 7, generator=generator).double()
        train = AdaptiveDataLoader(
            torch.utils.data.TensorDataset(data[:, :5], data[:, 5:]),
            self.batch_size,
            shuffle=True,
            max_local_batch_size=self.max_local_batch_size,
        )
        for epoch in remaining_epochs_until(2):
            for number, (x, y) in train.enumerate():
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                if (epoch, number) == self.stop:
                    request_stop_and_wait()
        return steps.state_of(net), scheduler.get_last_lr()[0]

    def run(self, world_size: int, directory: Path) -> list[Any]:
        variables = {
            "ELASTICRUN_CHECKPOINT_DIR": str(directory),
            "ELASTICRUN_SAVE_INTERVAL": "off",
            "ELASTICRUN_JOB": "test",
        }
        return run_generation(self, world_size, timeout=TIMEOUT, variables=variables)


@pytest.mark.slow
def test_restarts_at_other_world_sizes_end_alike(tmp_path: Path) -> None:
    (uninterrupted,) = Interrupted(max_local_batch_size=57).run(1, tmp_path / "once")
    directory = tmp_path / "often"
    assert Interrupted(stop=(0, 1)).run(2, directory) == [None] * 2
    assert Interrupted(stop=(0, 4)).run(1, directory) == [None]
    assert Interrupted(stop=(1, 2)).run(4, directory) == [None] * 4
    for result in Interrupted().run(3, directory):
        torch.testing.assert_close(result, uninterrupted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_restart_at_the_same_world_size_is_exact_to_the_bit(tmp_path: Path) -> None:
    uninterrupted = Interrupted().run(3, tmp_path / "once")
    Interrupted(stop=(0, 3)).run(3, tmp_path / "often")
    again = Interrupted().run(3, tmp_path / "often")
    torch.testing.assert_close(again, uninterrupted, rtol=0, atol=0)


class Stepwise:
    """Runs cases one after another; asks for a stop in a batch of one of them."""

    cases = (
        "several_optimizers",
        "over_tokens-scaled",
        "frozen_in_turns-False",
        "averaged_by_hand",
        "contrastive",
        "line_search-False",
    )

    def __init__(self, stop_in: str | None = None) -> None:
        self.stop_in = stop_in

    def __call__(self) -> list[Any]:
        torch.set_num_threads(1)
        return [EVERY[label](Stopping(label, self.stop_in)) for label in self.cases]

    def run(self, directory: Path) -> list[Any]:
        variables = {
            "ELASTICRUN_CHECKPOINT_DIR": str(directory),
            "ELASTICRUN_SAVE_INTERVAL": "off",
            "ELASTICRUN_JOB": "test",
        }
        return run_generation(self, 2, timeout=TIMEOUT, variables=variables)


class Stopping(Elastic):
    def __init__(self, name: str, stop_in: str | None) -> None:
        super().__init__(name, None if name in WHOLE else 2)
        self._stops = name == stop_in

    def batches(self) -> Iterator[tuple[int, Any]]:
        for number, batch in super().batches():
            if self._stops and elasticrun.rank() == 0:
                self._stops = False
                request_stop_and_wait()
            yield number, batch


@pytest.mark.slow
def test_a_stop_in_any_case_changes_no_bit(tmp_path: Path) -> None:
    calm = Stepwise().run(tmp_path / "calm")
    for label in Stepwise.cases:
        assert Stepwise(stop_in=label).run(tmp_path / "often") == [None] * 2
    again = Stepwise().run(tmp_path / "often")
    torch.testing.assert_close(again, calm, rtol=0, atol=0)


@pytest.mark.slow
def test_checkpoint_of_replicas_loads_into_the_bare_module(tmp_path: Path) -> None:
    result, _ = Interrupted().run(2, tmp_path)
    (path,) = tmp_path.glob("checkpoint-*/model")
    bare = Interrupted().module()
    bare.load_state_dict(torch.load(path, weights_only=True))
    torch.testing.assert_close(steps.state_of(bare), result[0], rtol=0, atol=0)


def train_and_evaluate_unevenly() -> tuple[list[Tensor], int, int]:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net.register_buffer("rank", torch.zeros((), dtype=torch.int32))
    net.requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = AdaptiveDataParallel(net, optimizer)
    train = AdaptiveDataLoader(Numbers(36), 12, max_local_batch_size=2)
    valid = AdaptiveDataLoader(Numbers(7), 5, even_batches=False)
    num_evaluated = 0
    for _ in remaining_epochs_until(2):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            net.rank.fill_(elasticrun.rank())
            model(batch[:, None].float()).sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in valid:
                assert not net[1].training
                num_evaluated += len(model(batch[:, None].float()))
    return [*net.buffers()], num_evaluated, int(net.rank)


@pytest.mark.slow
def test_buffers_are_those_of_rank_0_where_replicas_evaluate_unevenly() -> None:
    outcomes = run_generation(train_and_evaluate_unevenly, 3, timeout=TIMEOUT)
    for buffers, _, rank in outcomes:
        torch.testing.assert_close(buffers, outcomes[0][0], rtol=0, atol=0)
        assert rank == 0
    assert [number for _, number, _ in outcomes] == [2 * 3, 2 * 3, 2 * 1]


def use_gradients_unevenly(*, trains: bool) -> int:
    net = nn.Linear(1, 1)
    model = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), 0.1))
    model.train(trains)
    loader = AdaptiveDataLoader(Numbers(9), 4, even_batches=False, name="uneven")
    return sum(len(model(batch[:, None].float())) for batch in loader)


@pytest.mark.slow
def test_training_where_a_replica_may_have_no_batch_is_refused() -> None:
    train = functools.partial(use_gradients_unevenly, trains=True)
    with pytest.raises(GenerationFailed, match=r"`uneven` \(.*even_batches=False"):
        run_generation(train, 2)
    assert run_generation(train, 1) == [9]
    evaluate = functools.partial(use_gradients_unevenly, trains=False)
    assert run_generation(evaluate, 2) == [5, 4]


def count_reductions() -> tuple[int, int]:
    torch.set_num_threads(1)
    net = steps.network()
    optimizer = steps.sgd(net)
    model = AdaptiveDataParallel(net, optimizer)
    num_reductions = 0

    def reduce(group, bucket):  # type: ignore[no-untyped-def]
        nonlocal num_reductions
        num_reductions += 1
        return allreduce_hook(group, bucket)

    assert model._reduction is not None
    model._reduction.register_comm_hook(None, reduce)
    num_passes = 0
    data = torch.utils.data.TensorDataset(*steps.samples())
    for x, y in AdaptiveDataLoader(data, 10, max_local_batch_size=1):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        num_passes += 1
    return num_reductions, num_passes


@pytest.mark.slow
def test_a_global_batch_has_one_reduction() -> None:
    for num_reductions, num_passes in run_generation(count_reductions, 2):
        assert (num_reductions, num_passes) == (3, 5 + 5 + 2)


def skip_the_last_backward_pass() -> None:
    net = steps.network()
    optimizer = steps.sgd(net)
    model = AdaptiveDataParallel(net, optimizer)
    data = torch.utils.data.TensorDataset(*steps.samples())
    loader = AdaptiveDataLoader(data, 10, max_local_batch_size=3)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        if not loader.is_step:
            loss.backward()
        with (
            pytest.raises(
                elasticrun.ElasticRunError,
                match=r"had no backward pass through the model",
            )
            if loader.is_step
            else warnings.catch_warnings()
        ):
            optimizer.step()
        if loader.is_step:
            break


@pytest.mark.slow
def test_step_without_a_reduction_is_refused() -> None:
    run_generation(skip_the_last_backward_pass, 2)
