"""Steps over several loaders at once equal those of one replica."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    ElasticRunError,
    init,
)
from elasticrun.testing import run_generation
from tests.support.generations import run_once
from tests.support.programs import request_stop_and_wait
from tests.support.steps import network, samples, sgd, state_of

pytestmark = pytest.mark.slow

TIMEOUT = 300.0


@dataclass(frozen=True)
class Training:
    """Trains on two members by a loss over each of them.

    Attributes:
        weigh: How losses are weighed: by the "member", also by its "count", or not.
        sizes: Of the members' batches.
    """

    name: str
    mode: Any
    weigh: str = "member"
    sizes: tuple[int, int] = (4, 7)
    max_local_batch_size: int | None = None

    def __call__(self, stop_in: int = -1) -> list[Tensor]:
        net = network()
        optimizer = sgd(net)
        model = AdaptiveDataParallel(net, optimizer, name=f"{self.name}-model")
        x, y = samples(23)
        members = {
            "first": AdaptiveDataLoader(
                TensorDataset(x, y),
                self.sizes[0],
                shuffle=True,
                max_local_batch_size=self.max_local_batch_size,
                name=f"{self.name}-first",
            ),
            "second": AdaptiveDataLoader(
                TensorDataset(y.flip(0).repeat(1, 3)[:, :5], y),
                self.sizes[1],
                shuffle=True,
                name=f"{self.name}-second",
            ),
        }
        both = CombinedLoader(members, self.mode, name=self.name)
        num_steps = 0
        for _ in range(2):
            for turn in both:
                inputs = [x for x, _ in turn.values()]
                outputs = model(torch.cat(inputs)).split([len(x) for x in inputs])
                loss = torch.zeros(())
                for (key, (_, y)), output in zip(turn.items(), outputs, strict=True):
                    own = mse_loss(output, y)
                    if self.weigh == "member":
                        own = model.weigh(own, member=members[key])
                    elif self.weigh == "count":
                        own = model.weigh(own, len(y), member=members[key])
                    loss = loss + own
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_steps += both.is_step
                if num_steps == stop_in:
                    request_stop_and_wait()
        return state_of(net)


TRAININGS = [
    Training("weighed", "min_size"),
    Training("cut", "max_size_cycle", max_local_batch_size=1),
    Training("counted", "min_size", "count"),
    Training("alike", "min_size", "not", sizes=(6, 6)),
    Training("unlike", "max_size_cycle", "not"),
]


def train_each() -> list[Any]:
    torch.set_num_threads(1)
    results: list[Any] = []
    for training in TRAININGS:
        try:
            results.append(training())
        except ElasticRunError as error:
            results.append(str(error))
    return results


def test_a_step_is_that_of_one_replica_or_refused() -> None:
    one = run_once(train_each)
    for several in run_generation(train_each, 3, timeout=TIMEOUT):
        *equal, refused = several
        torch.testing.assert_close(equal, one[:-1], rtol=1e-9, atol=1e-9)
        assert re.search(r"in its step 0 have 4, 7 samples.*among 3 replicas", refused)


def train_on(directory: str, stop_in: int = -1) -> list[Tensor]:
    torch.set_num_threads(1)
    init(directory, save_interval="off")
    return TRAININGS[1](stop_in)


def test_it_goes_on_with_other_replicas(tmp_path: Path) -> None:
    directory = str(tmp_path)
    one = run_once(TRAININGS[1])
    assert run_generation(train_on, 3, directory, 8, timeout=TIMEOUT) == [None] * 3
    for several in run_generation(train_on, 2, directory, timeout=TIMEOUT):
        torch.testing.assert_close(several, one, rtol=1e-9, atol=1e-9)
