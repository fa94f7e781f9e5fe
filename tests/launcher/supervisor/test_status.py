"""What a status takes from the supervisor, and what it costs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.supervisor.generation import Member
from elasticrun.launcher.supervisor.restart_policy import CrashHistory
from elasticrun.launcher.supervisor.status import JobStatus
from elasticrun.launcher.terminal.status_table import render
from tests.launcher.program import NUM_SAMPLES
from tests.launcher.running import elasticrun, running
from tests.support.stage import Stage, wait_until


@pytest.fixture
def leaders() -> Iterator[list[int]]:
    """Three processes with groups of their own."""
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            found.append(process.pid)
        yield found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every look at all processes."""
    found: list[str] = []
    listdir = os.listdir

    def list_(path: Any = ".") -> list[str]:
        if path == "/proc":
            found.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", list_)
    return found


def book_of(leaders: list[int], folder: Path, *, newest: int = 0) -> JobStatus:
    """Return the book of a job that trains in these processes.

    Args:
        newest: The checkpoint from which it goes on.
    """
    replica: Any = None
    log: Any = None
    members = [
        Member(rank, pid, replica, -1, 0.0, log) for rank, pid in enumerate(leaders)
    ]
    members[0].report = {"position": "epoch 0, sample 6"}
    supervisor: Any = SimpleNamespace(
        options=SimpleNamespace(
            name="job",
            nodes=None,
            checkpoint_dir=folder,
            local_dir=folder,
            log_dir=folder,
        ),
        generation=SimpleNamespace(number=4, members=members, running=members),
        state="training",
        successors=SimpleNamespace(
            size=3,
            spares=leaders[:1],  # As if the first one were another one.
            num_ready_spares=1,
        ),
        reports=SimpleNamespace(on_reported=[], last_output="", last_output_at=0.0),
        loop=EventLoop(),
        nodes=SimpleNamespace(round=None),
        crashes=CrashHistory(3, newest_at_start=newest),
        policy=SimpleNamespace(started_at=0.0),
    )
    return JobStatus(supervisor)


def test_a_status_looks_at_all_processes_once(
    leaders: list[int], looks: list[str], tmp_path: Path
) -> None:
    status = book_of(leaders, tmp_path).status()
    assert len(looks) == 1
    assert [member["pid"] for member in status["members"]] == leaders
    assert all(member["memory"] > 0 for member in status["members"])
    assert status["spare_memory"] == status["members"][0]["memory"]


def test_a_job_that_goes_on_has_its_checkpoint_before_it_trains(
    leaders: list[int], tmp_path: Path
) -> None:
    assert book_of(leaders, tmp_path).status()["checkpoint"] is None
    status = book_of(leaders, tmp_path, newest=7).status()
    assert (status["checkpoint"], status["seconds_since_checkpoint"]) == (7, None)
    assert (status["last_output"], status["seconds_since_output"]) == ("", None)
    (saved,) = re.findall("  checkpoint   .*", render([status]))
    assert saved == f"  checkpoint   7, in {tmp_path}"


def test_the_line_that_lives_looks_at_none(
    leaders: list[int], looks: list[str], tmp_path: Path
) -> None:
    line = book_of(leaders, tmp_path).status_line()
    assert line == "job: training | generation 4, 3 replicas | epoch 0, sample 6"
    assert looks == []


def test_a_group_that_has_ended_has_used_nothing(leaders: list[int]) -> None:
    gone = subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    usage = processes.usage_of_groups([gone.pid, *leaders])
    assert usage[gone.pid] == (0.0, 0)
    assert all(usage[leader][1] > 0 for leader in leaders)


@pytest.mark.slow
def test_status_says_where_the_job_is(stage: Stage) -> None:
    assert "no job of this user is running" in elasticrun(stage, "status").stdout
    options = ["--replicas", 2, "--save-interval", 0]
    with running(stage, *options, "--", "--hold", "0:10") as job:
        job.wait_until_held(0, 2)
        wait_until(lambda: job.status()["index"] == 60)
        wait_until(lambda: job.status()["checkpoint"] == 10)
        status = job.status()
        text = job.ask("status", "test").stdout
        other = job.ask("status", "other")
        stage.mark("go-0")
        assert job.wait() == 0
    assert (other.returncode, other.stdout) == (3, "")
    assert "no job 'other' of this user is running" in other.stderr
    assert status["job"] == "test"
    assert status["pid"] == job.pid
    assert status["state"] == "training"
    assert (status["epoch"], status["num_samples"]) == (0, NUM_SAMPLES)
    assert (status["generation"], status["checkpoint"]) == (0, 10)
    assert 0 <= status["seconds_since_checkpoint"] < 600
    assert status["checkpoint_dir"] == str(stage.checkpoints)
    assert [each["pid"] for each in status["members"]] == [
        job.pid_of(0, 0),
        job.pid_of(0, 1),
    ]
    assert all(each["memory"] > 1e6 for each in status["members"])
    assert re.match(
        rf"test \({job.pid}\): training for \d+ s, 2 replicas, generation 0\n"
        r"  position     epoch 0 of 2, batch 10 of 40 in `loader-0`\n",
        text,
    )
    ended = elasticrun(stage, "status", stage.checkpoints)
    assert re.match(
        r"test: finished after \d+ s\n  ended        [\d: -]+, \d+ s ago\n"
        r"  position     the end of epoch 1\n  checkpoint   \d+, in ",
        ended.stdout,
    )
    assert ended.stdout.endswith(f"  logs         {stage.checkpoints}/logs\n")
    (told,) = json.loads(elasticrun(stage, "status", "checkpoints", "--json").stdout)
    assert (told["state"], told["code"], told["causes"]) == ("ended", 0, [])


@pytest.mark.slow
@pytest.mark.wide
def test_a_program_without_boundaries_is_told_so(stage: Stage) -> None:
    script = stage.root / "train.py"
    script.write_text(
        "import itertools, torch\n"
        "from elasticrun import AdaptiveDataLoader, register\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])\n"
        "register(optimizer=optimizer)\n"
        "for _ in itertools.cycle(AdaptiveDataLoader(torch.zeros(2))):\n"
        "    optimizer.step()\n"
    )
    why = "times since the last boundary, outside of any loop over an Adaptive"
    with running(stage, script=script, ELASTICRUN_GRACE=5) as job:
        wait_until(lambda: why in job.events)
        wait_until(lambda: why in (job.status()["no_boundary"] or ""))
        assert why in job.ask("status").stdout
        job.process.terminate()
        job.wait()
    assert f"{why}DataLoader): exiting without a new checkpoint" in job.events
