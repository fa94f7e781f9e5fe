"""SIGKILL at every system call of a job's life leaves the old or the new checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.test_store_crashes import REPOSITORY, assert_survived, make_old


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_killed_at_any_system_call_leaves_the_old_or_the_new(memory: Path) -> None:
    make_old(memory / "old")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.crash.victims", str(memory)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot trace" in finished.stderr:
        pytest.skip(f"strace may not be used here: {finished.stderr}")
    assert finished.returncode == 0, finished.stderr
    lives = [json.loads(line) for line in finished.stdout.splitlines()]
    killed = [name for name, code in lives if code == -signal.SIGKILL]
    assert len(killed) > 100
    # Some calls, as those to get memory, come more often in one life than in another.
    assert len(killed) > 0.9 * len(lives)
    assert {code for _, code in lives} <= {0, -signal.SIGKILL}
    for name in ("rename-1", "fsync-1", "mkdir-1", "write-3"):
        assert name in killed
    found = [assert_survived(memory / name) for name, _ in lives]
    assert set(found) == {3, 4}
