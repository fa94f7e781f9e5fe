"""One job in a checkpoint directory at a time."""

from __future__ import annotations

import os
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
    variables,
)
from tests.support.stage import Stage, wait_until

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
