"""A replica that is steadily slower than the others is named."""

from __future__ import annotations

import sys

import pytest

from elasticrun.launcher.supervisor.stragglers import Stragglers
from tests.launcher.running import running
from tests.support.stage import Stage

# An `elasticrun` that looks at replicas twice a second.
ATTENTIVE = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.supervisor import stragglers
stragglers._WINDOW_SECONDS = 0.5
sys.exit(main())
"""
SLOW = """
import time
import torch
import torch._dynamo  # In the forkserver; else the optimizer of each replica does.
import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel

class Data:
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep(0.1 if elasticrun.rank() == 1 else 0.0)
        return torch.ones(1)

net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model = AdaptiveDataParallel(net, optimizer)
for epoch in elasticrun.remaining_epochs_until(1):
    for x in AdaptiveDataLoader(Data(), 3, name="train"):
        model(x).sum().backward()
        optimizer.step()
"""


def told(times: list[list[float]], *, seconds: float = 3.0) -> list[str]:
    """Return what is said of replicas that need so many seconds a step, by window."""
    stragglers = Stragglers()
    sums = [0.0] * len(times[0])
    said = []
    for number, window in enumerate([[0.0] * len(sums), *times]):
        sums = [total + 10 * each for total, each in zip(sums, window, strict=True)]
        reports = [
            {
                "generation": 0,
                "time": seconds * number,
                "own_seconds": total,
                "num_steps": 10 * number,
            }
            for total in sums
        ]
        said.append(stragglers.note(reports))
    return [text for text in said if text]


def test_it_is_named_once() -> None:
    (text,) = told([[0.1, 0.1, 0.2]] * 12)
    assert text.startswith("rank 2 is slower than the others")
    assert "200 ms a step, they 100 ms" in text


@pytest.mark.parametrize(
    "times",
    [
        [[0.1, 0.1, 0.2]] * 3,
        [[0.1, 0.1, 0.14]] * 12,
        [[0.0001, 0.0001, 0.0003]] * 12,
        [[0.1, 0.2], [0.2, 0.1]] * 6,
        [[0.1, 0.2], [0.1, 0.2], [0.1, 0.1]] * 4,
        [[0.2]] * 12,
    ],
    ids=["not for long", "a little", "tiny", "in turns", "now and then", "alone"],
)
def test_what_is_not_steady_is_not_named(times: list[list[float]]) -> None:
    assert told(times) == []


def test_a_window_needs_time() -> None:
    assert told([[0.1, 0.2]] * 12, seconds=0.1) == []


@pytest.mark.slow
def test_the_launcher_names_it(stage: Stage) -> None:
    script = stage.root / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, "-c", ATTENTIVE]
    with running(stage, "--replicas", 3, script=script, command=command) as job:
        job.wait_until_said("rank 1 is slower than the others")
