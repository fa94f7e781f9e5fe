"""`logs`, of a job that runs and of one that has ended."""

from __future__ import annotations

import pytest

from tests.launcher.running import WITHOUT_TORCH, running
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


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
