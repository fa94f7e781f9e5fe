"""A stop in a loop that a thread runs, for which the main thread waits in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import queue, threading
from elasticrun import AdaptiveDataLoader, request_stop

class Ahead(threading.Thread):
    def __init__(self, loader):
        super().__init__(name="reads-ahead", daemon=True)
        self.loader, self.batches = loader, queue.Queue(1)

    def run(self):
        for batch in self.loader:
            request_stop()
            self.batches.put(batch)
        self.batches.put(None)

ahead = Ahead(AdaptiveDataLoader(range(40), 4))
ahead.start()
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "grace", "exit_code"),
    [
        ("while ahead.batches.get() is not None: pass", 2, 75),
        ("ahead.join(); print('cleaned up')", 60, 0),
    ],
    ids=["hangs", "ends"],
)
def test_the_program_ends(
    tmp_path: Path, then: str, grace: int, exit_code: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        env={
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
            "ELASTICRUN_JOB": "test",
            "ELASTICRUN_GRACE": str(grace),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == exit_code, ended.stderr
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    if exit_code:
        assert "has stopped in thread 'reads-ahead'" in ended.stderr
        assert "did not end within 2 s" in ended.stderr
    else:
        assert ended.stdout == "cleaned up\n"
