"""A checked program cannot write outside of its scratch copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUARDED = """
import os, sys
from elasticrun.check.replica.guard import OutsideOfScratchError, guard_folders
guard_folders([sys.argv[1]], scratch=sys.argv[2])
open(sys.argv[2] + "/own", "w").close()
open(sys.argv[1] + "/kept").close()
for act in (
    lambda: open(sys.argv[1] + "/kept", "a"),
    lambda: os.remove(sys.argv[1] + "/kept"),
    lambda: os.rename(sys.argv[2] + "/own", sys.argv[1] + "/kept"),
    lambda: os.mkdir(sys.argv[1] + "/new"),
    lambda: open(sys.argv[2] + "/link", "w"),
):
    try:
        act()
    except OutsideOfScratchError:
        print("refused")
"""


def test_what_is_the_users_is_guarded(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    (home / "kept").write_text("mine")
    (scratch / "link").symlink_to(home / "kept")
    code = [sys.executable, "-c", GUARDED, str(home), str(scratch)]
    process = subprocess.run(code, capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["refused"] * 5, process.stderr
    assert (home / "kept").read_text() == "mine"
