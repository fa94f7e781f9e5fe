"""What would let replicas drift apart is refused; what reduces gradients is kept."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    ElasticRunError,
    remaining_epochs_until,
)
from elasticrun.testing import run_generation
from tests.support import losses, steps
from tests.support.programs import request_stop_and_wait
from tests.support.steps import Elastic

pytestmark = pytest.mark.slow

TIMEOUT = 300.0


def train_by(
    name: str, backward: Callable[[Any, Elastic, Tensor, Tensor], None]
) -> str | None:
    """Train for a loop; return with which error that ended."""
    given = Elastic(name, None)
    net = steps.network()
    optimizer = steps.sgd(net)
    model = given.parallel(net, optimizer)
    try:
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            backward(model, given, x, y)
            optimizer.step()
    except ElasticRunError as error:
        return str(error)
    return None


def twice_through_one_output(model: Any, _: Elastic, x: Tensor, y: Tensor) -> None:
    loss = mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    (0.1 * loss).backward()


def two_forwards_and_then_two_backwards(
    model: Any, _: Elastic, x: Tensor, y: Tensor
) -> None:
    first, second = mse_loss(model(x), y), mse_loss(model(-x), y)
    first.backward()
    second.backward()


def gathered_and_not_weighed(model: Any, given: Elastic, x: Tensor, y: Tensor) -> None:
    outputs, _ = losses.gather(given, model(x))
    targets, _ = losses.gather(given, y)
    mse_loss(outputs, targets).backward()


REFUSED = {
    twice_through_one_output: "retain_graph=True",
    two_forwards_and_then_two_backwards: "one of an earlier forward pass",
    gathered_and_not_weighed: r"goes through _Gather, which .*weighs (1\.2|0\.9)",
}


def train_by_each() -> list[str | None]:
    torch.set_num_threads(1)
    return [train_by(each.__name__, each) for each in REFUSED]


def test_what_would_let_replicas_drift_apart_is_refused() -> None:
    for errors in run_generation(train_by_each, 3, timeout=TIMEOUT):
        for error, text in zip(errors, REFUSED.values(), strict=True):
            assert error is not None
            assert re.search(text, error)
    assert run_generation(train_by_each, 1) == [[None] * len(REFUSED)]


class Compressed:
    """Trains with a communication hook, and asks for a stop in one batch."""

    def __init__(self, kind: str, stop_in: int = -1) -> None:
        self.kind = kind
        self.stop_in = stop_in

    def __call__(self) -> list[Tensor]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # PowerSGD's, of itself.
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
        model = AdaptiveDataParallel(net, optimizer)
        if self.kind == "PowerSGD":
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
            model.register_comm_hook(state, powerSGD_hook)
        else:
            model.register_comm_hook(None, fp16_compress_hook)
        data = torch.randn(30, 16, generator=torch.Generator().manual_seed(1))
        loader = AdaptiveDataLoader(TensorDataset(data), 5)
        for _ in remaining_epochs_until(2):
            for number, (x,) in loader.enumerate():
                optimizer.zero_grad()
                mse_loss(model(x), x).backward()
                optimizer.step()
                if number == self.stop_in:
                    request_stop_and_wait()
        return steps.state_of(net)

    def run(self, world_size: int, directory: Path) -> list[Any]:
        variables = {
            "ELASTICRUN_CHECKPOINT_DIR": str(directory),
            "ELASTICRUN_SAVE_INTERVAL": "off",
        }
        return run_generation(self, world_size, variables=variables, timeout=TIMEOUT)


@pytest.mark.parametrize("kind", ["PowerSGD", "fp16"])
def test_a_communication_hook_goes_on_after_a_restart(
    tmp_path: Path, kind: str
) -> None:
    calm = Compressed(kind).run(2, tmp_path / "calm")
    directory = tmp_path / "stopped"
    assert Compressed(kind, stop_in=3).run(2, directory) == [None] * 2
    again = Compressed(kind).run(2, directory)
    torch.testing.assert_close(again, calm, rtol=0, atol=0)


class Partitioned:
    """Trains with an optimizer of which each replica keeps a part of the state."""

    def __init__(self, stop_in: int = -1) -> None:
        self.stop_in = stop_in

    def __call__(self) -> list[Tensor]:
        torch.set_num_threads(1)
        net = steps.network()
        if elasticrun.world_size() > 1:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(
                net.parameters(), torch.optim.Adam, lr=0.1
            )
        else:
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        model = AdaptiveDataParallel(net, optimizer)
        loader = AdaptiveDataLoader(TensorDataset(*steps.samples()), 5)
        for number, (x, y) in loader.enumerate():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if number == self.stop_in:
                request_stop_and_wait()
        return steps.state_of(net)

    def run(self, world_size: int, directory: Path) -> list[Any]:
        variables = {
            "ELASTICRUN_CHECKPOINT_DIR": str(directory),
            "ELASTICRUN_SAVE_INTERVAL": "off",
        }
        return run_generation(self, world_size, variables=variables, timeout=TIMEOUT)


def test_a_partitioned_optimizer_goes_on_with_other_replicas(tmp_path: Path) -> None:
    (calm,) = Partitioned().run(1, tmp_path / "calm")
    directory = tmp_path / "stopped"
    assert Partitioned(stop_in=0).run(2, directory) == [None] * 2
    assert Partitioned(stop_in=2).run(3, directory) == [None] * 3
    (again,) = Partitioned().run(1, directory)
    torch.testing.assert_close(again, calm, rtol=1e-10, atol=1e-10)


def drift_and_save(directory: str) -> list[str]:
    """Save twice, the second time with a parameter of rank 1 that is its own."""
    elasticrun.init(directory, save_interval="off", async_save=False)
    net = steps.network()
    AdaptiveDataParallel(net)
    elasticrun.save_all_states()
    if elasticrun.rank() == 1:
        with torch.no_grad():
            net[2].weight[0, 0] += 1e-3
    with pytest.raises(CheckpointError) as caught:
        elasticrun.save_all_states()
    committed = Path(directory).glob("*/manifest.json")
    return [str(caught.value), *(each.parent.name for each in committed)]


def test_replicas_that_have_drifted_apart_are_not_saved(tmp_path: Path) -> None:
    for text, *checkpoints in run_generation(drift_and_save, 2, str(tmp_path)):
        assert "drifted apart: 2.weight of 'model' on rank 1 differ from those" in text
        assert checkpoints == ["checkpoint-00000001"]
