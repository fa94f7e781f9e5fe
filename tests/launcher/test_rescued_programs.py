"""A rescue of what programs do between two boundaries is exact, or there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launcher.running import Running, run
from tests.support.stage import Stage

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "mortal_programs.py"

pytestmark = pytest.mark.slow(30)

Death = tuple[int, str, int]  # Rank, place, batch.

BEHIND = "rank {} has not come to the boundary"
# Programs, deaths, and why there is no rescue after some of these.
CASES: list[tuple[str, list[Death], list[str]]] = [
    ("moco", [(1, "forward", 3)], ["parameters of 'model' have changed since"]),
    ("sums", [(0, "step", 3)], [BEHIND.format(0)]),
    ("dropout", [(1, "step", 4)], [BEHIND.format(1)]),
    ("own_ddp", [(0, "forward", 3)], ["BatchNorms in 'net' have other averages"]),
    ("own_ddp", [(1, "forward", 7)], []),
    (
        "labelled",
        [(0, "forward", 3), (1, "forward", 4), (0, "forward", 8)],
        ["BatchNorms in 'model' have other averages"] * 2,
    ),
    ("logged", [(1, "forward", 3), (0, "forward", 5)], []),
    ("logged", [(0, "step", 3)], [BEHIND.format(0)]),
    ("masked", [(1, "forward", 2), (0, "forward", 3), (1, "forward", 7)], []),
    ("gan", [(1, "backward", 5), (0, "step", 7), (1, "step", 9)], []),
    (
        "steps",
        [(1, "step", 2), (1, "forward", 3), (0, "forward", 9)],
        ["gradients wait"],
    ),
    ("streams", [(1, "forward", 3), (0, "forward", 4), (1, "step", 6)], []),
    (
        "usual",
        [(0, "forward", 2), (1, "backward", 3), (1, "step", 6), (1, "end", 8)],
        ["gradients wait"],  # The scaler has left the step before it out.
    ),
]


def mortal(root: Path, program: str, deaths: list[Death]) -> Running:
    root.mkdir()
    own = {"ELASTICRUN_RESCUE": "always", "DEATHS": json.dumps(deaths)}
    job = run(Stage(root), "--replicas", 2, script=SCRIPT, PROGRAM=program, **own)
    assert job.wait() == 0, job.events
    return job


def end_of(job: Running) -> str:
    return re.findall(r"END .*", job.output)[-1]


@pytest.mark.wide
@pytest.mark.parametrize(("program", "deaths", "why_none"), CASES)
def test_a_rescue_is_exact_or_the_crash_says_why_there_is_none(
    tmp_path: Path, program: str, deaths: list[Death], why_none: list[str]
) -> None:
    check_rescued(tmp_path, program, deaths, why_none)


def test_a_dead_replicas_draws_and_sums_are_kept_or_the_crash_says_why_not(
    tmp_path: Path,
) -> None:
    deaths = [(1, "forward", 2), (0, "backward", 4), (1, "added", 5), (0, "added", 7)]
    check_rescued(tmp_path, "dropout", deaths, [BEHIND.format(0)])


def check_rescued(
    tmp_path: Path,
    program: str,
    deaths: list[Death],
    why_none: list[str],
    *,
    on: str = "cpu",
) -> None:
    calm = mortal(tmp_path / "calm", program, [])
    job = mortal(tmp_path / "mortal", program, deaths)
    assert end_of(job) == end_of(calm)
    assert f"on {on}" in job.output
    crashed = re.findall(r"crashed at .*; (?:rank \d+ saved|no rescue: .*)", job.events)
    assert len(crashed) == len(deaths), job.events
    reasons = [each for each in crashed if "no rescue: " in each]
    assert len(reasons) == len(why_none), job.events
    assert all(map(str.__contains__, reasons, why_none)), job.events
