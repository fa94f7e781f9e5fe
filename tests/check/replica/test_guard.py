"""A checked program cannot write outside of its scratch copy."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.check.replica.guard import can_restrict, what_is_not_guarded
from tests.check.checking import check, run

GUARDED = """
import os, subprocess, sys
import numpy
import torch
from elasticrun.check.replica.guard import OutsideOfScratchError, guard_files
home, scratch = sys.argv[1:]
guard_files([scratch], [home])
open(scratch + "/own", "w").close()
torch.save(1, scratch + "/own.pt")
os.makedirs(scratch + "/a/b")
os.rename(scratch + "/own", scratch + "/a/b/moved")
open(scratch + "/own", "w").close()
open(home + "/kept").close()
open("/dev/null", "w").close()
os.chdir(scratch)
for act in (
    lambda: open(home + "/kept", "a"),
    lambda: os.open(home + "/kept", os.O_WRONLY),
    lambda: os.remove(home + "/kept"),
    lambda: os.rename(scratch + "/own", home + "/kept"),
    lambda: os.mkdir(home + "/new"),
    lambda: open(os.path.dirname(home) + "/beside", "w"),
    lambda: open("link", "w"),
    lambda: torch.save(1, home + "/kept"),
    lambda: torch.save(1, f="link"),
    lambda: numpy.ones(1).tofile(home + "/kept"),
    lambda: numpy.memmap("link", mode="r+"),
):
    try:
        act()
    except OutsideOfScratchError as error:
        print(error)
"""
# What Python does not see.
IN_C = """
import sqlite3
def by_shell():
    subprocess.run(["sh", "-c", f"echo gone > {home}/kept"], check=True)
def by_sqlite():
    with sqlite3.connect(home + "/data.db") as data:
        data.execute("create table t (x)")
def by_torch():
    torch._C.PyTorchFileWriter(home + "/kept")
for act in by_shell, by_sqlite, by_torch:
    try:
        act()
    except Exception as error:
        print("refused", error)
subprocess.run(["sh", "-c", f"echo 1 > {scratch}/by-shell"], check=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that is not in shared memory, where all may write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path).resolve()


@pytest.mark.parametrize(
    "in_c",
    [
        "",
        pytest.param(
            IN_C, marks=pytest.mark.skipif(not can_restrict(), reason="no Landlock")
        ),
    ],
)
def test_what_is_the_users_is_guarded(folder: Path, in_c: str) -> None:
    home, scratch = folder / "home", folder / "scratch"
    home.mkdir()
    scratch.mkdir()
    (home / "kept").write_text("mine")
    (scratch / "link").symlink_to(home / "kept")
    code = [sys.executable, "-c", GUARDED + in_c, str(home), str(scratch)]
    process = subprocess.run(code, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("the program would change") == 11, process.stdout
    assert "'link' leads there, through a link" in process.stdout
    assert f"--writable {home}" in process.stdout
    assert process.stdout.count("refused") == (3 if in_c else 0), process.stdout
    assert (home / "kept").read_text() == "mine"
    assert [each.name for each in home.iterdir()] == ["kept"]


SCRIPT = """
import sys
import torch
import elasticrun
from elasticrun import AdaptiveDataLoader, remaining_epochs_until
from outputs import write_results

loader = AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.arange(8)), 4)
for epoch in remaining_epochs_until(1):
    for batch in loader:
        pass
    write_results(sys.argv[1])
"""


@pytest.mark.slow
def test_results_that_lie_elsewhere_are_never_overwritten(folder: Path) -> None:
    project, elsewhere = folder / "project", folder / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (elsewhere / "results").write_text("precious")
    (project / "out").symlink_to(elsewhere)
    (project / "train.py").write_text(SCRIPT)
    (project / "outputs.py").write_text(
        "import torch\n"
        "def write_results(folder):\n    torch.save(1, folder + '/results')\n"
    )
    found = check(project, "train.py", "--replicas", 1, "--", "out")
    assert (elsewhere / "results").read_text() == "precious"
    assert found.code == 4
    said = found.report.problem + found.report.detail
    assert "--writable" in said, said
    assert found.report.notes == []
    allowed = ("--replicas", 1, "--at", "0:0:1", "--writable", elsewhere)
    ended = run(project, *allowed, "train.py", "--", "out")
    assert ended.returncode != 4, ended.stdout
    assert (elsewhere / "results").read_bytes() != b"precious"


def test_what_cannot_be_guarded_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if can_restrict():
        assert what_is_not_guarded(["/srv/project"]) == ""
    said = what_is_not_guarded([str(tmp_path / "project")])
    assert "libraries in C (h5py, sqlite) and other programs write" in said
