"""`elasticrun status --scaling`, for whoever rescales the job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from elasticrun.errors import NO_JOB
from tests.launcher.running import (
    REPOSITORY,
    Running,
    elasticrun,
    running,
    variables,
)
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
def test_a_scheduler_reads_what_each_number_of_replicas_gives(stage: Stage) -> None:
    with running(stage, "--replicas", 1, script=PROGRAM) as job:
        rows = wait_until_measured(job, 1)
        assert [row["basis"] for row in rows] == ["measured", "predicted"]
        assert job.ask("scale", 2).returncode == 0
        rows = wait_until_measured(job, 2)
        assert [row["replicas"] for row in rows] == [1, 2, 3, 4]
        assert rows[0]["basis"] == "measured"  # By the generation before.
        shown = job.ask("status", "--scaling").stdout.splitlines()
        assert shown[-1].split() == ["from", "5", "not", "measured"]
        directory = job.status()["checkpoint_dir"]
        assert job.ask("stop").returncode == 0
    ended = elasticrun(stage, "status", directory, "--scaling").stdout.splitlines()
    assert ended[-1] == shown[-1]


@pytest.mark.slow
@pytest.mark.wide
def test_the_loop_of_the_page_chooses_the_number(stage: Stage) -> None:
    page = (REPOSITORY / "docs/howto/shared-server.md").read_text()
    found = re.search(r"^    import json.*\n(?:\n|    .*\n)+", page, re.MULTILINE)
    assert found is not None
    code = textwrap.dedent(found[0]).replace("time.sleep(300)", "time.sleep(0.5)")
    shim = stage.root / "bin" / "elasticrun"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\n{sys.executable} -m elasticrun "$@"\nset -- $? "$@"\n'
        'echo "$@" >> commands\nexit $1\n'
    )
    shim.chmod(0o755)
    done = stage.root / "commands"
    own = variables(stage, PATH=f"{shim.parent}:{os.environ['PATH']}")
    options = ["--replicas", 1, "--name", "digits"]
    with running(stage, *options, script=PROGRAM) as job:
        loop = subprocess.Popen([sys.executable, "-c", code], env=own, cwd=stage.root)
        scaled = re.compile(r"^0 scale \d+ digits$", re.MULTILINE)
        wait_until(
            lambda: (
                loop.poll() is not None
                or (done.exists() and scaled.search(done.read_text()))
            ),
            "a scale",
        )
        assert loop.poll() is None
        loop.kill()
        loop.wait()
        assert job.process.poll() is None
