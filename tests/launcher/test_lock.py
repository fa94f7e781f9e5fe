"""One job in a checkpoint directory at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.launcher.directory import check_meeting_place
from elasticrun.launcher.options import OptionError
from tests.launcher.running import (
    PROGRAM,
    WITHOUT_TORCH,
    elasticrun,
    run,
    running,
    scaled,
    variables,
)
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


def test_a_second_job_is_kept_out_of_a_live_directory(stage: Stage) -> None:
    """Also while no replica holds the lock: before the first one, or between two."""
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        lock = stage.checkpoints / "launcher.lock"
        wait_until(lambda: lock.exists() and lock.read_text())
        for more in ([], ["--fresh"], ["--name", "other"]):
            refused = elasticrun(stage, "run", *more, script)
            assert refused.returncode == 2
            assert refused.stdout == ""
            [line] = refused.stderr.splitlines()
            assert (
                f"another job is running with {stage.checkpoints} (process {job.pid} on"
                in line
            )
        job.process.kill()  # A lock ends with its launcher.
        job.process.wait()
        assert run(stage, "--replicas", 1, "--fresh").wait() == 0
    assert stage.checkpoints.with_name("checkpoints.old-1").exists()


def test_a_job_that_was_started_otherwise_is_respected(stage: Stage) -> None:
    program = [sys.executable, PROGRAM, stage.root, "--hold", "0:3"]
    with subprocess.Popen(program, env=variables(stage)) as other:
        wait_until(lambda: stage.has("held-0-0"))
        refused = elasticrun(stage, "run", "--replicas", 1, PROGRAM, stage.root)
        assert refused.returncode == 2
        assert f"(process {other.pid} on" in refused.stderr
        stage.mark("go-0")
    assert other.returncode == 0


def test_nodes_do_not_meet_where_another_user_can_write(stage: Stage) -> None:
    """Unless they say where; torch unpickles what the store there holds."""
    stage.checkpoints.mkdir(mode=0o700)
    stage.checkpoints.chmod(0o777)
    refused = run(stage, "--nodes", "1:2")
    assert refused.process.returncode == 2
    for part in ("by everybody (mode 777)", "chmod o-w", "--rdzv-endpoint HOST:PORT"):
        assert part in refused.events
    stage.checkpoints.chmod(0o755)
    check_meeting_place(stage.checkpoints)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("name", ["", "rendezvous"])
def test_nodes_do_not_meet_in_a_folder_of_another_user(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    os.chown(folder, 12345, -1)
    with pytest.raises(OptionError, match=f"{folder} belongs to user 12345"):
        check_meeting_place(tmp_path)


@pytest.mark.parametrize("how", ["kill", "program", *in_wide("start", "save", "scale")])
def test_a_job_whose_directory_is_moved_begins_nowhere_else(
    stage: Stage, how: str
) -> None:
    """Whoever has moved it may have started another job in its place."""
    options = ["--replicas", 2, "--save-interval", 0, "--", "--hold", "0:9"]
    if how == "program":  # Which says itself where it saves.
        options += ["--elsewhere"]
    place = stage.root / "own" if how == "program" else stage.checkpoints
    with running(stage, *options) as job:
        if how == "start":  # Before there are replicas.
            job.wait_until_said("logs in")
        else:
            job.wait_until_held(0, 2)
        place.rename(stage.root / "moved")
        if how == "kill":
            os.kill(job.pid_of(0, 1), signal.SIGKILL)
        elif how == "scale":
            assert scaled(job, 1).returncode == 4
        stage.mark("go-0")
        assert job.wait() == 1, job.events
    assert not list(place.glob("checkpoint-*"))
    assert "generation 1: " not in job.events
    assert ", restart 1 of" not in job.events
    last = job.events.splitlines()[-1]
    if how == "program":
        assert "failed: another job may use its checkpoints now" in last
    else:
        assert f"failed: {place / 'launcher.lock'}, which this launcher has" in last
        assert "give --checkpoint-dir where it is now" in last
