"""A worker that imports the program does not become a replica of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

UNGUARDED = {
    "init": "elasticrun.init()",
    "loader": "AdaptiveDataLoader(Numbers(8), 2, name='top')",
}

PROGRAM = """
import elasticrun
from elasticrun import AdaptiveDataLoader
from tests.support.data import Numbers

{unguarded}
if __name__ == "__main__":
    loader = AdaptiveDataLoader(
        Numbers(8), 2, num_workers=1, multiprocessing_context="{method}"
    )
    print([batch.tolist() for batch in loader])
"""


def run(path: Path, unguarded: str, method: str) -> subprocess.CompletedProcess[str]:
    path.write_text(PROGRAM.format(unguarded=unguarded, method=method))
    return subprocess.run(
        [sys.executable, str(path)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ELASTICRUN_CHECKPOINT_DIR": str(path.parent / "checkpoints"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unguarded", "method"), [("loader", "spawn"), ("init", "forkserver")]
)
def test_a_worker_that_imports_what_uses_the_job_says_how_to_guard_it(
    tmp_path: Path, unguarded: str, method: str
) -> None:
    ended = run(tmp_path / "program.py", UNGUARDED[unguarded], method)
    assert ended.returncode == 1
    assert "imports the main module of the program" in ended.stderr
    assert "if __name__ == '__main__':" in ended.stderr
    assert "exited unexpectedly" in ended.stderr  # What the replica itself says.


@pytest.mark.slow
@pytest.mark.wide
def test_a_guarded_program_runs(tmp_path: Path) -> None:
    ended = run(tmp_path / "program.py", "", "spawn")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[[0, 1], [2, 3], [4, 5], [6, 7]]\n"
