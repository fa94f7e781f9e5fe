"""What would let replicas drift apart is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import elasticrun
from elasticrun import AdaptiveDataParallel, CheckpointError, ElasticRunError
from elasticrun.testing import run_generation
from tests.support import losses, steps
from tests.support.steps import Elastic

pytestmark = pytest.mark.slow

TIMEOUT = 300.0


def train_by(
    name: str, backward: Callable[[Any, Elastic, Tensor, Tensor], None]
) -> str | None:
    """Train for a loop; return with which error that ended."""
    loader = steps.make_loader(name, None)
    given = Elastic(name, loader)
    net = steps.network()
    optimizer = steps.sgd(net)
    model = given.parallel(net, optimizer)
    try:
        for x, y in loader:
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
    gathered_and_not_weighed: r"goes through _Gather, which .*weighs (1\.286|0\.857)",
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


def drift_and_save(directory: str, is_registered: bool) -> list[str]:
    """Save twice, the second time with a parameter of rank 1 that is its own."""
    elasticrun.init(directory, save_interval="off", async_save=False)
    net = steps.network()
    if is_registered:
        elasticrun.register(model=net)
    else:
        AdaptiveDataParallel(net)
    elasticrun.save_all_states()
    if elasticrun.rank() == 1:
        with torch.no_grad():
            net[2].weight[0, 0] += 1e-3
    with pytest.raises(CheckpointError) as caught:
        elasticrun.save_all_states()
    committed = Path(directory).glob("*/manifest.json")
    return [str(caught.value), *(each.parent.name for each in committed)]


@pytest.mark.parametrize("is_registered", [False, True])
def test_replicas_that_have_drifted_apart_are_not_saved(
    tmp_path: Path, is_registered: bool
) -> None:
    arguments = (str(tmp_path), is_registered)
    for text, *checkpoints in run_generation(drift_and_save, 2, *arguments):
        assert "drifted apart: 2.weight of 'model' on rank 1 differ from those" in text
        assert checkpoints == ["checkpoint-00000001"]
