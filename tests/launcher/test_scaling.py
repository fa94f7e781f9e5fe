"""`elasticrun status --scaling`, and a number for whoever rescales the job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elasticrun.errors import NO_JOB
from elasticrun.launcher.options import OptionError, Replicas
from elasticrun.launcher.scaling import best_number, parse_share
from tests.launcher.running import Running, elasticrun, running
from tests.support.stage import Stage, wait_until

PROGRAM = Path(__file__).with_name("scaling.py")


def table(job: Running) -> list[dict[str, Any]]:
    """Return its rows; none before there is a job, and a checkpoint with times."""
    said = job.ask("status", job.pid, "--scaling", "--json")
    if said.returncode != 0:
        assert said.returncode in (2, NO_JOB), said.stderr
        return []
    rows: list[dict[str, Any]] = json.loads(said.stdout)["train"]
    return rows


def wait_until_measured(job: Running, replicas: int) -> list[dict[str, Any]]:
    def is_measured() -> bool:
        rows = table(job)
        return len(rows) >= replicas and rows[replicas - 1]["basis"] == "measured"

    wait_until(is_measured, f"steps with {replicas} replicas\n{job.events}")
    return table(job)


@pytest.mark.slow
@pytest.mark.wide
def test_a_scheduler_reads_how_many_replicas_are_worth_it(stage: Stage) -> None:
    with running(stage, "--replicas", 1, script=PROGRAM) as job:
        rows = wait_until_measured(job, 1)
        assert [row["basis"] for row in rows] == ["measured", "predicted"]
        best = job.ask("status", "--worth", 0)
        assert best.stdout == "2\n"
        assert job.ask("scale", best.stdout.strip()).returncode == 0
        rows = wait_until_measured(job, 2)
        assert [row["replicas"] for row in rows] == [1, 2, 3, 4]
        assert rows[0]["basis"] == "measured"  # By the generation before.
        assert job.ask("status", "--worth", 0).stdout == "4\n"
        too_much = job.ask("status", "--worth", 99)
        assert (too_much.returncode, too_much.stdout) == (2, "")
        shown = job.ask("status", "--scaling").stdout.splitlines()
        assert shown[-1].split() == ["from", "5", "not", "measured"]
        assert job.ask("stop").returncode == 0


# `--scale-by`.

# An `elasticrun` that need not wait until a rescaling has paid off.
IMPATIENT = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher import scaling
scaling._TIMES_COST = -1
sys.exit(main())
"""
SOON = [sys.executable, "-c", IMPATIENT]


@pytest.mark.slow
def test_a_command_decides_how_many_replicas_there_are(stage: Stage) -> None:
    seen = stage.root / "seen.json"
    rule = f"cat > {seen}.new; mv {seen}.new {seen}; echo 1"
    options = ["--replicas", "1:2", "--scale-by", rule]
    with running(stage, *options, script=PROGRAM, command=SOON) as job:
        job.wait_until_said("1 replica from now on")
        rows = wait_until_measured(job, 1)
        assert rows[1]["basis"] == "measured"  # It began with two.
        assert job.ask("stop").returncode == 0
    assert [row["replicas"] for row in json.loads(seen.read_text())["train"]]
    assert job.events.count("from now on") == 1
    assert "rescaling from 2 to 1 replica" in job.events


@pytest.mark.slow
def test_as_many_replicas_as_are_worth_their_share(stage: Stage) -> None:
    rule = "efficiency:0.000001"  # Whatever the second one brings.
    options = ["--replicas", "1:2", "--scale-by", rule]
    one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))  # Begin with one.
    with running(stage, *options, script=PROGRAM, command=SOON, before=one_core) as job:
        job.wait_until_said("2 replicas from now on")
        wait_until(lambda: job.status()["replicas"] == 2, f"2 replicas\n{job.events}")
        assert job.ask("stop").returncode == 0


@pytest.mark.slow
@pytest.mark.wide
def test_a_command_that_prints_no_number_changes_nothing(stage: Stage) -> None:
    options = ["--replicas", "1:2", "--scale-by", "echo many"]
    with running(stage, *options, script=PROGRAM, command=SOON) as job:
        job.wait_until_said("the command printed no number, but 'many")
        assert job.status()["target"] == 2
        assert job.ask("stop").returncode == 0
    assert job.events.count("--scale-by") == 1


def rows_of(speedups: dict[int, float | None]) -> list[dict[str, Any]]:
    return [{"replicas": n, "speedup": speedup} for n, speedup in speedups.items()]


ROWS = rows_of({1: 1.0, 2: 1.9, 3: 2.1, 4: 2.9, 5: None})


@pytest.mark.parametrize(
    ("share", "now", "least", "most", "best"),
    [
        (0.7, 1, 1, 8, 4),
        (0.9, 1, 1, 8, 2),
        (0.9, 4, 1, 8, 2),
        (1.0, 4, 1, 8, 1),
        (1.0, 4, 2, 8, 2),  # None is worth it, so the fewest that may be.
        (0.7, 1, 1, 3, 3),
        (0.1, 5, 1, 8, 5),  # Nothing is known of as many as there are.
        (0.1, 6, 1, 8, 6),
    ],
)
def test_each_replica_is_worth_its_share(
    share: float, now: int, least: int, most: int, best: int
) -> None:
    assert best_number(ROWS, share, now, Replicas(now, least, most)) == best


def test_what_gains_less_than_a_rescaling_costs_is_left() -> None:
    rows = rows_of({1: 1.0, 2: 1.9, 3: 1.98})
    assert best_number(rows, 0.5, 2, Replicas(2, 1, 8)) == 2
    assert best_number(rows, 0.5, 1, Replicas(1, 1, 8)) == 3


@given(
    some.lists(some.floats(0.1, 20), min_size=1, max_size=12),
    some.floats(0.01, 1),
    some.data(),
)
def test_it_stays_within_bounds_and_rests(
    speedups: list[float], share: float, data: some.DataObject
) -> None:
    """What it has chosen it chooses again: no job goes to and fro."""
    rows = rows_of(dict(enumerate(speedups, 1)))
    least = data.draw(some.integers(1, len(rows)))
    most = data.draw(some.integers(least, len(rows) + 2))
    now = data.draw(some.integers(least, most))
    bounds = Replicas(now, least, most)
    best = best_number(rows, share, now, bounds)
    assert least <= best <= most
    assert best_number(rows, share, best, bounds) == best


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "nan", "much", ""])
def test_a_share_is_a_number_up_to_1(text: str) -> None:
    with pytest.raises(OptionError, match="above 0 and up to 1"):
        parse_share(f"efficiency:{text}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scale-by", "efficiency:0.7"], "needs --replicas MIN:MAX"),
        (
            ["--scale-by", "echo 1", "--replicas", "1:2", "--nodes", "2"],
            "--scale-by with --nodes",
        ),
        (["--scale-by", "efficiency:7", "--replicas", "1:2"], "above 0 and up to 1"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    stage: Stage, options: list[str], said: str
) -> None:
    refused = elasticrun(stage, "run", *options, PROGRAM)
    assert refused.returncode == 2
    assert said in refused.stderr
