"""What a crash costs, how often it may happen, and what is said to be its cause."""

from __future__ import annotations

import os
import signal

import pytest

from elasticrun.testing import read_trace
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    WITHOUT_TORCH,
    forkserver_of,
    impatient,
    run,
    running,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, freeze

pytestmark = pytest.mark.slow


def begins(stage: Stage) -> dict[int, tuple[int, int]]:
    """Return the first (epoch, batch) of each generation."""
    found: dict[int, tuple[int, int]] = {}
    for line in read_trace(stage.trace):
        place = line["epoch"], line["batch"]
        found[line["generation"]] = min(place, found.get(line["generation"], place))
    return found


def test_a_killed_rank_costs_what_came_after_the_last_checkpoint(
    stage: Stage,
) -> None:
    job = run(
        stage,
        *("--replicas", 2, "--save-interval", 0),
        *("--", "--at", "0:1:30:kill", "--workers", 1),
    )
    assert job.wait() == 0, job.events
    _, resumed_at = begins(stage)[1]
    assert resumed_at in (29, 30)  # The save of boundary 30 may still be in flight.
    assert "rank 1 was killed by signal 9 (SIGKILL)" in job.events
    assert f"restart 1 of 3 from checkpoint {resumed_at}" in job.events
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))
    logs = stage.checkpoints / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        "generation-0000",
        "generation-0001",
    ]


def test_the_first_cause_is_the_exception_not_the_lost_connection(
    stage: Stage,
) -> None:
    job = run(
        stage,
        *("--replicas", 3, "--save-interval", 0, "--max-restarts", 0),
        *("--", "--at", "0:2:9:raise"),
    )
    assert job.wait() == 1
    [cause] = [line for line in job.events.splitlines() if " crashed at " in line]
    assert cause.endswith("rank 2 raised ValueError: the loss is not a number")
    trace = job.events.partition(cause)[2]
    assert 'raise ValueError("the loss is not a number")' in trace
    assert "launcher/replica/main.py" not in trace
    assert "no restarts are allowed (--max-restarts 0)" in job.events


def test_a_replica_that_leaves_the_others_is_the_cause(stage: Stage) -> None:
    options = ["--replicas", 2, "--save-interval", 0, "--", "--at", "0:1:9:leave"]
    job = run(stage, *options)
    assert job.wait() == 0, job.events
    [cause] = [line for line in job.events.splitlines() if " crashed at " in line]
    assert "rank 1 ended with exit code 0 while the others were still train" in cause


@pytest.mark.wide
def test_the_budget_is_refilled_by_a_newer_checkpoint_only(stage: Stage) -> None:
    # Each of the first three crashes has a newer checkpoint than the one before.
    crashes = [f"{generation}:0:{10 * generation + 5}:kill" for generation in range(3)]
    options = [option for crash in crashes for option in ("--at", crash)]
    job = run(
        stage,
        *("--replicas", 1, "--save-interval", 0, "--max-restarts", 1),
        *("--", *options),
    )
    assert job.wait() == 0, job.events
    assert job.events.count("restart 1 of 1") == 3
    assert list(begins(stage)) == [0, 1, 2, 3]


def test_a_budget_without_checkpoints_is_spent(stage: Stage) -> None:
    crashes = [f"{generation}:0:7:exit" for generation in range(3)]
    options = [option for crash in crashes for option in ("--at", crash)]
    job = run(stage, "--replicas", 1, "--max-restarts", 2, "--", *options)
    assert job.wait() == 1
    assert "rank 0 exited with code 3" in job.events
    assert "restart 1 of 2 from the beginning" in job.events
    assert "restart 2 of 2 in 1 s from the beginning" in job.events
    assert "the last new checkpoint is 2 restarts ago" in job.events
    assert set(begins(stage).values()) == {(0, 0)}


def test_an_event_is_one_line_whatever_was_raised(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("raise ValueError('one\\ntwo')")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        assert job.wait() == 1
    said = [line for line in job.events.splitlines() if not line.startswith("[0]")]
    place = [" crashed at " in line for line in said].index(True)
    assert said[place].endswith("rank 0 raised ValueError: one")
    assert said[place + 1] == "two"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise KeyError('no such layer')", "rank 0 raised KeyError: 'no such layer'"),
        pytest.param(
            "def broken(:", "SyntaxError: invalid syntax", marks=pytest.mark.wide
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 11)",
            "killed by signal 11",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_crash_before_the_first_batch_fails_at_once(
    stage: Stage, line: str, text: str
) -> None:
    script = stage.root / "script.py"
    script.write_text(f"import elasticrun\nelasticrun.init()\n{line}\n")
    with running(stage, "--replicas", 1, script=script) as job:
        assert job.wait() == 1
        wait_until_nothing_is_left(stage)
    assert text in job.events
    assert "before the first batch, so it is not tried again" in job.events
    assert "restart" not in job.events
    assert "elasticrun/launcher" not in job.events


KILLED_EARLY = """
import os, signal, elasticrun
starts = open("starts", "a+")
number = starts.tell()
starts.write("."); starts.close()
if number == 0:
    os.kill(os.getpid(), signal.SIGTERM)  # Before there is a job that could save.
elasticrun.init()
if number < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_before_the_first_batch_spends_a_restart(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(KILLED_EARLY)
    with running(stage, "--replicas", 1, script=script) as job:
        assert job.wait() == 0, job.events
    assert "killed by signal 15 (SIGTERM)" in job.events
    assert "killed by signal 9 (SIGKILL)" in job.events
    assert "restart 2 of 3" in job.events


def test_a_killed_forkserver_is_replaced_and_nobody_notices(stage: Stage) -> None:
    options = ["--replicas", 2, "--", "--hold", "0:9"]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        os.kill(forkserver_of(job.pid), signal.SIGKILL)
        job.wait_until_said("the forkserver has ended; starting another one")
        answer = job.ask("status", "--json")
        assert '"state": "training"' in answer.stdout
        stage.mark("go-0")
        assert job.wait() == 0
        wait_until_nothing_is_left(stage)
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_a_stop_does_not_put_off_the_end_of_a_replica_that_hangs(stage: Stage) -> None:
    options = ["--replicas", 1, "--grace", 100_000, "--", "--hold", "0:9"]
    with running(stage, *options, command=impatient(stage)) as job:
        job.wait_until_held(0, 1)
        freeze(job.pid_of(0, 0))  # It cannot print its stacks: the launcher waits.
        stage.mark("hung")
        job.wait_until_said("printing the stacks")
        job.process.terminate()
        job.wait_until_said("SIGTERM: saving")
        stage.mark("dumped")
        os.kill(job.pid_of(0, 0), signal.SIGCONT)
        assert job.wait() == 143, job.events
    assert job.events.count("printing the stacks") == 1
    assert "stopped without a new checkpoint: rank 0 passed no boundary" in job.events
