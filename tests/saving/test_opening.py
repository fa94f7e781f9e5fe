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


@pytest.mark.parametrize("saves", [True, False])
def test_a_program_that_saves_nothing_says_so(tmp_path: Path, saves: bool) -> None:
    """At its start and at its stop, without any logging having been set up."""
    place = (
        {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path), "ELASTICRUN_JOB": "test"}
        if saves
        else {}
    )
    ended = subprocess.run(
        [sys.executable, "-c", STOPS],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 75
    if saves:
        assert ended.stderr == ""
    else:
        start, stop = ended.stderr.splitlines()
        assert "nothing is saved" in start
        assert "ELASTICRUN_CHECKPOINT_DIR" in start
        assert "nothing was saved" in stop
