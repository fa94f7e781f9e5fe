"""A replica that trains on a GPU dies, and another one saves what was trained.

The survivor's GPU waits in a collective for the dead one, which NCCL would let it do
for ten minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.test_rescue import end_of, mortal, resumed_at
from tests.launcher.test_rescued_programs import check_rescued
from tests.support.stage import Stage

pytestmark = pytest.mark.gpus


def test_whoever_dies_wherever_nothing_is_trained_twice(tmp_path: Path) -> None:
    for name in ("calm", "mortal"):
        (tmp_path / name).mkdir()
    calm = mortal(Stage(tmp_path / "calm"), [], num_replicas=2)
    deaths = [
        (0, "forward", 0, 4),
        (1, "loss", 0, 6),
        (0, "backward", 1, 2),
        (1, "step", 1, 7),
        (1, "between", 1, 0),
        (0, "step", 2, 9),
    ]
    job = mortal(Stage(tmp_path / "mortal"), deaths, num_replicas=2)
    assert end_of(job) == end_of(calm)
    assert "on cuda:0" in job.output
    assert resumed_at(job) == [
        "epoch 0, loop 0, sample 80 of `loader-0`",
        "epoch 0, loop 0, sample 120 of `loader-0`",
        "epoch 1, loop 0, sample 60 of `loader-0`",
        "epoch 1, loop 0, sample 160 of `loader-0`",
        "epoch 1, loop 0, sample 200 of `loader-0`",
        "epoch 2, loop 0, sample 200 of `loader-0`",
    ]


@pytest.mark.parametrize(
    ("program", "deaths", "why_none"),
    [
        ("moco", [(1, "forward", 3)], ["parameters of 'model' have changed since"]),
        ("gan", [(1, "backward", 5), (0, "step", 7), (1, "step", 8)], []),
        (
            "steps",
            [(1, "step", 2), (1, "forward", 3), (0, "forward", 9)],
            ["gradients wait"],
        ),
        (
            "usual",
            [(0, "forward", 2), (1, "backward", 3), (1, "step", 4)],
            ["gradients wait"],
        ),
    ],
)
def test_a_rescue_is_exact_or_there_is_none(
    tmp_path: Path,
    program: str,
    deaths: list[tuple[int, str, int]],
    why_none: list[str],
) -> None:
    check_rescued(tmp_path, program, deaths, why_none, on="cuda:0")
