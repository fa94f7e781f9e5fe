"""The step of any number of replicas is that of one on the whole global batch."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.errors import STOPPED
from elasticrun.testing import GenerationFailed, run_generation, start_generation
from tests.support import losses, practices, steps
from tests.support.data import Numbers
from tests.support.programs import request_stop_and_wait
from tests.support.stage import Stage
from tests.support.steps import Case, Elastic, Torch

TIMEOUT = 1800.0  # Of what hangs: every process trains by all rows.
WORLD_SIZES = [1, 2, 3]
MAX_LOCAL_BATCH_SIZES = (None, 1, 2)
ZEROED = ["before forward", "before backward", "after step"]


@dataclass(frozen=True)
class Row:
    """A practice, and how it is compared with plain torch.

    Attributes:
        sizes: Into micro-batches of at most how many samples batches are cut.
        tolerance: None if its steps are those of as many replicas only.
    """

    case: Case
    sizes: tuple[int | None, ...] = MAX_LOCAL_BATCH_SIZES
    tolerance: float | None = 1e-12


def row(
    practice: Any,
    *,
    sizes: tuple[int | None, ...] = MAX_LOCAL_BATCH_SIZES,
    tolerance: float | None = 1e-12,
    **options: Any,
) -> tuple[str, Row]:
    label = "-".join([practice.__name__, *map(str, options.values())])
    case = functools.partial(practice, **options)
    return label.replace(" ", "-"), Row(case, sizes, tolerance)


WHOLE = (None,)  # It depends on how a batch is cut, or cannot be cut.
ROWS: dict[str, Row] = dict(
    [
        *(
            row(steps.everything, zeroed=zeroed, by=by)
            for zeroed, by in itertools.product(ZEROED, ["optimizer", "model"])
        ),
        row(steps.everything, set_to_none=False),
        row(steps.everything, is_scaled=False),
        row(steps.everything, gradient_as_bucket_view=True, set_to_none=False),
        row(steps.two_adversaries, freezes=True),
        row(steps.two_adversaries, sizes=WHOLE, freezes=False),
        row(steps.gradients_after_the_step),
        row(steps.several_optimizers),
        row(steps.different_rates),
        row(steps.regularised),
        row(steps.gradients_as_values),
        *(
            row(steps.structured_output, kind=kind)
            for kind in ["tuple", "dict", "dataclass"]
        ),
        *(row(steps.accumulated_by_hand, zeroed=when) for when in ["before", "after"]),
        row(steps.several_passes),
        row(steps.with_closure),
        *(row(steps.asking_for_steps, zeroed=when) for when in ["before", "after"]),
        row(steps.unused_parameters),
        row(steps.unused_parameters, gradient_as_bucket_view=True),
        row(steps.unused_parameters, looks_first=True, bucket_cap_mb=1),
        *(
            row(losses.over_tokens, kind=kind)
            for kind in ["plain", "scaled", "weighted"]
        ),
        row(losses.summed),
        row(losses.weighed_and_not),
        *(row(losses.frozen_in_turns, in_turns=turns) for turns in [True, False]),
        row(losses.reading_gradients),
        *(
            row(losses.averaged_by_hand, is_module=is_module)
            for is_module in [True, False]
        ),
        row(losses.contrastive, sizes=WHOLE),
        *(
            row(losses.global_loss, sizes=WHOLE, has_gradients=has)
            for has in [True, False]
        ),
        row(losses.different_means, sizes=WHOLE),
        *(
            row(practices.compiled, sizes=(2,), what=what)
            for what in ["inside", "in place", "layer", "around", "loss"]
        ),
        row(practices.autocast, tolerance=0.01),
        *(row(practices.checkpointed, use_reentrant=use) for use in [True, False]),
        *(
            row(practices.transformer, kind=kind, tolerance=1e-9)
            for kind in ["GPT-2", "ViT"]
        ),
        row(practices.gradient_penalty),
        row(practices.adversaries_in_turns, sizes=WHOLE),
        row(practices.muon, tolerance=0.01),
        row(practices.schedule_free),
        row(practices.sharded, sizes=WHOLE, kind="registered"),
        *(
            row(practices.sharded, kind=kind)
            for kind in ["mean", "counted", "two losses"]
        ),
        row(practices.partitioned),
        row(practices.compressed, sizes=WHOLE, tolerance=None),
    ]
)


HARMLESS = (
    "in one iteration of the loop, a loss was computed after",
    "find_unused_parameters=True was",
    "The .grad attribute of a Tensor",  # Read by torch.compile.
    "Grad strides do not match",  # DDP, of a gradient of one row.
)


Loops = tuple[tuple[int | None, list[str]], ...]  # A size each, and its rows.
ALL: Loops = tuple(
    (size, [label for label, each in ROWS.items() if size in each.sizes])
    for size in MAX_LOCAL_BATCH_SIZES
)
# Each row once: cut, if it can be.
EACH_ONCE: Loops = tuple(
    (size, [label for label, each in ROWS.items() if each.sizes[-1] == size])
    for size in (None, 2)
)
Results = dict[tuple[str, int | None], list[Any]]


class Table:
    """A program that trains by the rows of each loop together.

    Args:
        leave_in: The size of the loop and the number of the global batch before which
            rank 0 leaves.
        leave: How it does.
    """

    def __init__(
        self,
        loops: Loops,
        leave_in: tuple[int | None, int] | None = None,
        leave: Callable[[], None] = request_stop_and_wait,
    ) -> None:
        self._loops = loops
        self._leave_in = leave_in
        self._leave = leave

    def __call__(self) -> Results:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        for harmless in HARMLESS:
            warnings.filterwarnings("ignore", message=harmless)
        results = {}
        for size, labels in self._loops:

            def on_batch(number: int, size: int | None = size) -> None:
                if (size, number) == self._leave_in and elasticrun.rank() == 0:
                    self._leave()

            cases = {label: ROWS[label].case for label in labels}
            trained = steps.train_together(cases, size, on_batch)
            results |= {(label, size): result for label, result in trained.items()}
        return results


@functools.cache
def calm(world_size: int) -> list[Results]:
    """Return what all rows end with on each replica, if nothing interrupts them."""
    return run_generation(Table(ALL), world_size, timeout=TIMEOUT)


@functools.cache
def expected(label: str) -> list[Any]:
    return steps.train_plainly(ROWS[label].case)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_training_equals_plain_torch(world_size: int) -> None:
    assert differences(calm(world_size)) == {}


def differences(results: list[Results]) -> dict[str, str]:
    """Return what differs from plain torch, by the label of the row."""
    found = {}
    for label in ROWS:
        try:
            assert_plain(results, label)
        except AssertionError as error:
            found[label] = str(error)
    return found


def assert_plain(results: list[Results], label: str) -> None:
    """Compare what replicas ended with with plain torch, if that does the same."""
    each, first = ROWS[label], results[0]
    for size in each.sizes:
        if (label, size) not in first:
            continue
        for result in results:  # Replicas never differ.
            assert_same(result[label, size], first[label, size])
        if each.tolerance is not None:
            torch.testing.assert_close(
                first[label, size],
                expected(label),
                rtol=each.tolerance,
                atol=each.tolerance,
            )


def assert_same(result: Any, other: Any) -> None:
    torch.testing.assert_close(result, other, rtol=0, atol=0)


def leave(stage: Stage, world_size: int, *where: Any, exit_code: int = STOPPED) -> None:
    """Run a generation that leaves in the middle of a loop, in which it saves."""
    variables = stage.variables(ELASTICRUN_SAVE_EVERY=2, ELASTICRUN_ASYNC_SAVE="off")
    program = Table(EACH_ONCE, *where)
    with start_generation(program, world_size, variables=variables) as started:
        outcomes = started.wait(timeout=TIMEOUT)
    assert outcomes[0].exit_code == exit_code, outcomes[0].error
    assert stage.committed()


def kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(stage: Stage, world_size: int) -> list[Results]:
    variables = stage.variables()
    program = Table(EACH_ONCE)
    return run_generation(program, world_size, timeout=TIMEOUT, variables=variables)


@pytest.mark.wide
def test_two_replicas_equal_plain_torch_and_a_stop_and_a_kill_change_no_bit(
    stage: Stage,
) -> None:
    assert differences(calm(2)) == {}
    leave(stage, 2, (None, 1))
    leave(stage, 2, (2, 5), kill_this, exit_code=-signal.SIGKILL)
    for result, uninterrupted in zip(go_on(stage, 2), calm(2), strict=True):
        assert_same(result, {key: uninterrupted[key] for key in result})


@pytest.mark.slow(35)
@pytest.mark.wide
def test_restarts_at_other_world_sizes_end_alike(stage: Stage) -> None:
    leave(stage, 2, (None, 1))
    leave(stage, 1, (2, 1))
    assert differences(go_on(stage, 3)) == {}


def leave_midway() -> dict[tuple[str, int | None], list[Any]]:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    return {
        (how, size): steps.left_midway(
            Elastic(f"{how}.{size}", steps.make_loader(f"{how}.{size}", size)), how=how
        )
        for how in ("break", "exception")
        for size in MAX_LOCAL_BATCH_SIZES
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_loop_left_midway_leaves_nothing(world_size: int) -> None:
    for results in run_generation(leave_midway, world_size, timeout=TIMEOUT):
        for (how, _), result in results.items():
            plain = steps.left_midway(Torch(), how=how)
            torch.testing.assert_close(result, plain, rtol=1e-12, atol=1e-12)


def train_shortly() -> list[Tensor]:
    return steps.train_together({"summed": losses.summed}, None)["summed"]


@pytest.mark.slow
def test_checkpoint_of_replicas_loads_into_the_bare_module(stage: Stage) -> None:
    variables = stage.variables(ELASTICRUN_SAVE_INTERVAL=0)
    result, _ = run_generation(train_shortly, 2, variables=variables)
    path = max(stage.checkpoints.glob("checkpoint-*/size-None.summed-1"))
    bare = steps.network()
    bare.load_state_dict(torch.load(path, weights_only=True))
    assert_same(steps.state_of(bare), result)


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

    model.register_comm_hook(None, reduce)
    num_passes = 0
    loader = steps.make_loader("train", 1)
    for x, y in loader:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        num_passes += 1
    return num_reductions, num_passes


@pytest.mark.slow
def test_a_global_batch_has_one_reduction() -> None:
    for num_reductions, num_passes in run_generation(count_reductions, 2):
        assert (num_reductions, num_passes) == (3, 4 + 4 + 1)


def skip_the_last_backward_pass() -> None:
    net = steps.network()
    optimizer = steps.sgd(net)
    model = AdaptiveDataParallel(net, optimizer)
    loader = steps.make_loader("train", 2)
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
