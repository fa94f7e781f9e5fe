"""What a job says at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STOPS = """
import elasticrun
elasticrun.request_stop()
for epoch in elasticrun.remaining_epochs_until(2):
    pass
"""


@pytest.mark.parametrize(
    ("saves", "is_launched"), [(True, False), (True, True), (False, False)]
)
def test_a_program_says_what_it_saves(
    tmp_path: Path, saves: bool, is_launched: bool
) -> None:
    """At its start and at its stop, without any logging having been set up.

    Under `elasticrun run`, the launcher says that it has stopped.
    """
    place = (
        {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path), "ELASTICRUN_JOB": "test"}
        if saves
        else {}
    )
    if is_launched:
        place["ELASTICRUN_LAUNCHER_PID"] = str(os.getpid())
    ended = subprocess.run(
        [sys.executable, "-c", STOPS],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 75
    if is_launched:
        assert ended.stderr == ""
    elif saves:
        assert ended.stderr == (
            "stopping at the end of epoch 0 because of request_stop(); saved "
            f"{tmp_path}/checkpoint-00000001. The exit code is 75, and the same "
            "command resumes\n"
        )
    else:
        start, stop = ended.stderr.splitlines()
        assert "nothing is saved" in start
        assert "ELASTICRUN_CHECKPOINT_DIR" in start
        assert "nothing was saved" in stop
