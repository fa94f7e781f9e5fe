"""`logs`, of a job that runs and of one that has ended."""

from __future__ import annotations

import pytest

from tests.launcher.running import (
    WITHOUT_TORCH,
    elasticrun,
    run,
    running,
)
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


def test_logs_are_kept_by_generation_and_rank(stage: Stage) -> None:
    options = ["--replicas", 2, "--save-interval", 0, "--"]
    run(stage, *options, "--at", "0:1:5:raise")
    kept = stage.checkpoints
    newest = elasticrun(stage, "logs", kept)
    assert newest.stdout.endswith("[0] finished with 2\n[1] finished with 2\n")
    assert elasticrun(stage, "logs", kept, "--rank", 1).stdout.count("finished") == 1
    before = elasticrun(stage, "logs", kept, "--generation", 0, "--rank", 1)
    assert "ValueError: the loss is not a number\n" in before.stdout
    missing = elasticrun(stage, "logs", kept, "--generation", 7)
    assert missing.returncode == 3
    assert "generations: 0 (ranks 0, 1), 1 (ranks 0, 1)" in missing.stderr


def test_logs_of_a_running_job_come_before_a_folder_of_its_name(stage: Stage) -> None:
    (stage.root / "test").mkdir()
    script = stage.root / "script.py"
    script.write_text("import time; print('up', flush=True); time.sleep(1000)")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        wait_until(lambda: "up" in job.output)
        assert job.ask("logs", "test").stdout == "[0] up\n"
        assert "  last output  [0] up (" in job.ask("status").stdout
    assert job.ask("logs", stage.checkpoints).stdout == "[0] up\n"
    assert "has no such log" in job.ask("logs", "test").stderr


def test_logs_can_be_followed_to_the_end(stage: Stage) -> None:
    with running(stage, "--replicas", 1, "--", "--hold", "0:3") as job:
        job.wait_until_held(0, 1)
        stage.mark("go-0")
        followed = job.ask("logs", "-f")
    assert followed.returncode in (0, 3)  # 3: it had ended before it was asked.
    assert followed.returncode == 3 or followed.stdout == "[0] finished with 1\n"
