"""`make matrix` finds the interpreters of a machine, and says why one is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What `python -c` asks for is its version; all else needs torch, which it cannot have.
INTERPRETER = """#!/bin/sh
case "$2" in
    *print*) echo {version} ;;
    *sys.exit*) ;;
    *) echo "ERROR: No matching distribution found for torch" >&2; exit 1 ;;
esac
"""


def test_a_python_without_torch_is_skipped_with_the_reason(tmp_path: Path) -> None:
    for version in ("3.9.18", "3.99.1", "3.99.2"):
        interpreter = tmp_path / "versions" / version / "bin" / "python"
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text(INTERPRETER.format(version=version.replace(".", " ")))
        interpreter.chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "make").symlink_to(str(shutil.which("make")))
    (tools / "python3.98").write_text("no interpreter")
    (tools / "python3.98").chmod(0o755)
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "matrix.py")],
        cwd=ROOT,
        env={**os.environ, "PYENV_ROOT": str(tmp_path), "PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    skipped = "skipped: ERROR: No matching distribution found for torch"
    assert ended.stdout.splitlines() == [
        f"Python 3.99: {tmp_path}/versions/3.99.2/bin/python",
        f"Python 3.99-torch-2.7: {tmp_path}/versions/3.99.2/bin/python",
        f"Python 3.99-torch-newest: {tmp_path}/versions/3.99.2/bin/python",
        f"Python 3.99-lightning-2.1: {tmp_path}/versions/3.99.2/bin/python",
        f"Python 3.99: {skipped}",
        f"Python 3.99-torch-2.7: {skipped}",
        f"Python 3.99-torch-newest: {skipped}",
        f"Python 3.99-lightning-2.1: {skipped}",
    ]
    requirements = (ROOT / ".matrix" / "torch-2.7.txt").read_text().splitlines()
    assert "torch==2.7" in requirements
    requirements = (ROOT / ".matrix" / "lightning-2.1.txt").read_text().splitlines()
    assert "lightning==2.1.0" in requirements
    assert ended.returncode == 1  # The tests have run on none.
