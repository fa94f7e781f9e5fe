"""What a `scale` and a `stop` do to a running job."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest

from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    run,
    running,
    scaled,
    sizes,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


def test_scaling_loses_nothing_and_costs_no_restart(stage: Stage) -> None:
    options = ["--replicas", 2, "--max-restarts", 0, "--"]
    options += ["--hold", "0:9", "--hold", "1:19", "--hold", "2:39", "--workers", 1]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        more = scaled(job, 3)
        assert more.stdout == (
            "rescaling from 2 to 3 replicas\ngeneration 1 trains with 3 replicas\n"
        )
        job.wait_until_held(1, 3)
        fewer = scaled(job, 1, "test", held=1)
        assert fewer.returncode == 0, fewer.stderr
        job.wait_until_held(2, 1)
        nonsense = job.ask("scale", 0)
        assert nonsense.returncode == 4
        assert "0 replicas: give a number from 1 up" in nonsense.stderr
        same = job.ask("scale", 1, job.pid)
        assert same.stdout == "the job has 1 replica already\n"
        status = job.status()
        stage.mark("go-2")
        assert job.wait() == 0, job.events
        wait_until_nothing_is_left(stage)
    assert sizes(stage) == {0: 2, 1: 3, 2: 1}
    assert (status["replicas"], status["restarts"]) == (1, 0)
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_scaling_that_comes_before_training_is_not_lost(stage: Stage) -> None:
    holds = ["--hold", "0:9", "--hold", "1:19"]
    with running(stage, "--replicas", 1, "--", *holds) as job:
        job.wait_until_said("logs in")
        wait_until(lambda: job.ask("status").stdout.startswith("test"))
        answer = scaled(job, 2)  # Held if that came too late.
        assert answer.returncode == 0, answer.stderr
        for generation in (0, 1):
            stage.mark(f"go-{generation}")
        assert job.wait() == 0
    assert list(sizes(stage).values())[-1] == 2
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


SLOW_ONCE = """
import pathlib, sys, threading
mark = pathlib.Path(sys.argv[1], "began")
if not mark.exists():
    mark.touch()
    threading.Event().wait()
from tests.launcher.program import main
main()
"""


@pytest.mark.wide
def test_scaling_does_not_wait_for_a_script_that_only_starts(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(SLOW_ONCE)
    options = ["--replicas", 1, "--max-restarts", 0, "--grace", 1000, "--", stage.root]
    with running(stage, *options, script=script) as job:
        wait_until((stage.root / "began").exists)
        answer = job.ask("scale", 2)
        assert "generation 0 trains with 2 replicas" in answer.stdout
        assert job.wait() == 0, job.events
        wait_until_nothing_is_left(stage)
    assert sizes(stage) == {0: 2}  # Number 0 was not taken: nothing had begun.
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_a_rescaling_that_could_not_save_is_no_crash(stage: Stage) -> None:
    options = ["--replicas", 1, "--max-restarts", 0, "--grace", 0.5, "--"]
    with running(stage, *options, "--hold", "0:9", "--hold", "1:9") as job:
        job.wait_until_held(0, 1)
        assert job.ask("scale", 2).returncode == 0
        job.wait_until_said("no boundary came within 0.5 s of a rescaling")
        job.wait_until_held(1, 2)
        assert job.status()["restarts"] == 0
        stage.mark("go-1")
        assert job.wait() == 0, job.events


@pytest.mark.parametrize(
    "request_",
    ["scale", *in_wide("stop", "none")],
)
def test_a_last_save_that_failed_is_told(stage: Stage, request_: str) -> None:
    options = ["--replicas", 2, "--", "--at", "0:0:3:fill", "--hold", "0:9"]
    lost = "the last save failed (rank 0's log says why): everything is lost"
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        with ThreadPoolExecutor() as pool:
            if request_ != "none":
                size = [1] if request_ == "scale" else []
                answer = pool.submit(job.ask, request_, *size)
                state = "stopping" if request_ == "stop" else "rescaling"
                wait_until(lambda: job.status()["state"] == state)
            stage.mark("go-0" if request_ == "none" else "stop-0")
        code = job.wait()
    if request_ == "stop":
        assert (answer.result().returncode, code) == (4, 75)
        assert lost in answer.result().stderr
        assert f"stopped; {lost}; the same command resumes" in job.events
    elif request_ == "scale":
        assert (answer.result().returncode, code) == (0, 0)
        assert lost in answer.result().stdout
        assert re.search(f"generation 0 ended at .*; {re.escape(lost)}", job.events)
    else:
        assert code == 0
        assert f"; {lost}" in job.events
        again = run(stage, "--replicas", 1)
        assert again.wait() == 0
        assert "generation 1: 1 replica started" in again.events
    assert "No space left on device" in job.events


MEDDLED = """
import json, threading
import elasticrun
from tests.launcher.program import arguments, main

real = json.dumps

def dumps(value, **options):
    if threading.current_thread().name == "elasticrun-reporter":
        meddle(value)
    return real(value, **options)

json.dumps = dumps
main()
"""
REPORTS_LATE = """
def meddle(value):
    if (value.get("generation"), elasticrun.rank()) == (1, 1):
        arguments().stage.wait_for("report")
"""
REPORTS_FAIL = """
def meddle(value):
    if value["index"]:
        raise KeyError("no such thing")
"""


def test_who_scales_again_waits_for_the_new_number(stage: Stage) -> None:
    """Before the old generation has ended, and while the new one starts."""
    script = stage.root / "script.py"
    script.write_text(REPORTS_LATE + MEDDLED)
    holds = ["--hold", "0:9", "--hold", "1:19"]
    options = ["--replicas", 2, "--", stage.root, *holds]
    with running(stage, *options, script=script) as job, ThreadPoolExecutor() as pool:

        def scale(before: int, after: int) -> Future[CompletedProcess[str]]:
            asked = pool.submit(job.ask, "scale", after)
            job.wait_until_said(f"from {before} to {after} replicas")
            return asked

        job.wait_until_held(0, 2)
        overruled = scale(2, 3)
        unchanged = scale(3, 4)
        refused = overruled.result()
        changed = scale(4, 3)
        refused_too = unchanged.result()
        stage.mark("stop-0")
        wait_until(lambda: stage.has("held-1-0", "held-1-1", "held-1-2"))
        last = scale(3, 2)
        refused_last = changed.result()
        stage.mark("report")
        stage.mark("stop-1")
        answer = last.result()
        assert job.wait() == 0, job.events
    for each, asked, size in (
        (refused, 3, 4),
        (refused_too, 4, 3),
        (refused_last, 3, 2),
    ):
        assert each.returncode == 4
        assert f"goes on with {size} replicas, not {asked}" in each.stderr
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("generation 2 trains with 2 replicas\n")
    assert sizes(stage) == {0: 2, 1: 3, 2: 2}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_a_stop_gets_through_where_reports_fail(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(REPORTS_FAIL + MEDDLED)
    options = ["--replicas", 1, "--", stage.root, "--hold", "0:0"]
    with running(stage, *options, "--at", "0:0:1:await", script=script) as job:
        job.wait_until_held(0, 1)
        stage.mark("go-0")
        job.wait_until_said("this replica cannot report its position")
        assert job.ask("stop").stdout == "saving and ending\nended\n"
        assert job.wait() == 75
    assert "stopped; checkpoint 1 is saved" in job.events


SWALLOWS_ITS_STOP = """
from tests.launcher.program import main
try:
    main()
except:
    pass
"""


@pytest.mark.wide
def test_a_program_that_swallows_its_stop_has_not_finished(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(SWALLOWS_ITS_STOP)
    options = ["--replicas", 1, "--", stage.root, "--hold", "0:0"]
    with running(stage, *options, script=script) as job:
        job.wait_until_held(0, 1)
        stage.mark("stop-0")
        assert job.ask("stop").stdout == "saving and ending\nended\n"
        assert job.wait() == 75
    assert "stopped; checkpoint 1 is saved; the same command resumes" in job.events
