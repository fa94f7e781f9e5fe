"""What one replica computes by itself does not make it wait where the others act."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.programs import request_stop_and_wait

pytestmark = pytest.mark.slow


class Sampling:
    """Rank 0 shows what the model gives: after a step, and between loops."""

    def __init__(self, *, is_stopping: bool) -> None:
        self.is_stopping = is_stopping

    def __call__(self) -> int:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = AdaptiveDataParallel(net, optimizer)
        loader = AdaptiveDataLoader(Numbers(64), batch_size=8)
        for epoch in remaining_epochs_until(2):
            for number, x in loader.enumerate():
                optimizer.zero_grad()
                model(x.float()[:, None]).mean().backward()
                optimizer.step()
                if elasticrun.rank() == 0:
                    model(torch.ones(1, 1))
                    if self.is_stopping and (epoch, number) == (0, 3):
                        request_stop_and_wait()
            if elasticrun.rank() == 0:
                model(torch.ones(1, 1))
        return elasticrun.finished_epochs()


@pytest.mark.parametrize("save_every", [4, "epoch"])
def test_a_sample_of_rank_0_alone_delays_no_save(
    tmp_path: Path, save_every: int | str
) -> None:
    variables = {
        "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
        "ELASTICRUN_SAVE_INTERVAL": "off",
        "ELASTICRUN_SAVE_EVERY": str(save_every),
    }
    script = Sampling(is_stopping=False)
    assert run_generation(script, 2, variables=variables) == [2, 2]


def test_a_sample_of_rank_0_alone_delays_no_stop(tmp_path: Path) -> None:
    variables = {
        "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
        "ELASTICRUN_SAVE_INTERVAL": "off",
        "ELASTICRUN_JOB": "test",
    }
    first = run_generation(Sampling(is_stopping=True), 2, variables=variables)
    assert first == [None, None]
    second = run_generation(Sampling(is_stopping=False), 2, variables=variables)
    assert second == [2, 2]
