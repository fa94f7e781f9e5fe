"""What the forkserver imports changes nothing but how long a restart takes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from elasticrun.launcher.forks.imports import imports_of
from elasticrun.launcher.options import Program
from elasticrun.launcher.replica.reporter import modules_of_program
from tests.launcher.running import REPOSITORY, forkserver_of, running, scaled
from tests.support.stage import Stage


def imported(folder: Path, text: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(text)
    return imports_of(Program("script", str(script), (), (str(folder),)))


def test_only_imports_before_anything_else_are_taken(tmp_path: Path) -> None:
    text = (
        '"""Trains."""\n'
        "from __future__ import annotations\n"
        "import sklearn.datasets as d, torch  # both\n"
        "from torch import nn\n"
    )
    assert imported(tmp_path, text) == ["sklearn.datasets", "torch"]
    for line in (
        "os.environ['A'] = '1'",
        "if d:\n    import never",
        "d()",
        "from . import d",
    ):
        more = f"{text}{line}\nimport numpy\n"
        assert imported(tmp_path, more) == ["sklearn.datasets", "torch"]
    assert imported(tmp_path, "def broken(") == []


def test_what_optimizers_import_is_imported_for_all_replicas(tmp_path: Path) -> None:
    text = "import torch\nimport numpy as A\noptimizer = torch.optim.SGD(A, 0.1)\n"
    assert imported(tmp_path, text)[-1] == "torch._dynamo"
    (tmp_path / "own.py").touch()
    for line in (
        "os.environ['A'] = '1'",
        "os.putenv('A', '1')",
        "def main():\n    import own",
        "from .own import A",
    ):
        assert imported(tmp_path, f"import os\n{text}\n{line}\n")[-1] == "numpy"
    assert imported(tmp_path, "import torch, numpy\noptimal = 1\n")[-1] == "numpy"


def test_the_programs_own_modules_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "numpy").mkdir()  # Only a folder, which hides no installed package.
    (tmp_path / "data" / "__init__.py").touch()
    text = "import torch, numpy\nfrom data.sets import A\nimport sklearn\n"
    assert imported(tmp_path, text) == ["torch", "numpy"]


def test_a_module_is_read_as_a_script_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    text = "import torch\nfrom pack.data import A\nimport numpy\n"
    (tmp_path / "pack" / "train.py").write_text(text)
    program = Program("module", "pack.train", (), (str(tmp_path),))
    assert imports_of(program) == ["torch"]


class Stub:
    """What people put into `sys.modules` for a package that they do not have."""

    def __getattr__(self, name: str) -> Stub:
        return Stub()


class Raising:
    def __getattr__(self, name: str) -> None:
        raise KeyError(name)


def test_stand_ins_for_modules_are_taken_for_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = next(reversed(sys.modules))
    monkeypatch.setitem(sys.modules, "torch.again", sys.modules["torch"])
    monkeypatch.setitem(sys.modules, "stub", Stub())
    monkeypatch.setitem(sys.modules, "raising", Raising())
    monkeypatch.setitem(sys.modules, "none", None)
    found = modules_of_program(after=last)
    assert found.keys() - {"__main__"} == {"stub", "raising"}


CONFIGURED = 'import os\nVALUE = os.environ.get("BACKEND", "not chosen")\n'


@pytest.mark.slow
def test_a_script_finds_what_it_would_find_without_a_launcher(stage: Stage) -> None:
    site, scripts = stage.root / "site-packages", stage.root / "scripts"
    for folder in (site, scripts):
        folder.mkdir()
        (folder / "places.py").write_text(f"VALUE = {folder.name!r}\n")
    (site / "backend.py").write_text(CONFIGURED)
    script = scripts / "train.py"
    path = f"{REPOSITORY}{os.pathsep}{site}"
    options = ["--replicas", 1, "--save-interval", 0, "--", stage.root]

    script.write_text(
        "import os, places\nos.environ['BACKEND'] = 'chosen'\nimport backend\n"
        "print(backend.VALUE, places.VALUE)\n"
    )
    with running(stage, *options, script=script, PYTHONPATH=path) as job:
        assert job.wait() == 0, job.events
    assert job.output == "[0] chosen scripts\n"


NOTED = """
import os
import re
with open(os.environ["NOTES"], "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
# As libraries do for what they load; at last it does what it had better not.
SETS = """
import os
os.environ.setdefault("IMPORT_SETS", "yes")
os.environ.setdefault("USER_SETS", "no")
os.environ.pop("IMPORT_REMOVES", None)
os.environ["ELASTICRUN_GRACE"] = "7"
"""
SHOWS = """
import sets
import os
from tests.launcher import program
names = "IMPORT_SETS USER_SETS IMPORT_REMOVES OMP_NUM_THREADS ELASTICRUN_GRACE"
print(*map(os.environ.get, names.split()), flush=True)
program.main()
"""


@pytest.mark.slow
def test_variables_that_imports_change_are_changed_in_every_generation(
    stage: Stage,
) -> None:
    own = site_with(stage, sets=SETS)
    own |= {"USER_SETS": "yes", "IMPORT_REMOVES": "no", "OMP_NUM_THREADS": "3"}
    script = stage.root / "train.py"
    script.write_text(SHOWS)
    options = ["--replicas", 1, "--", stage.root, "--at", "0:0:10:kill"]
    with running(stage, *options, script=script, **own) as job:
        assert job.wait() == 0, job.events
    shown = re.findall(r"(?m)^\[0\] (yes .*|None .*)$", job.output)
    assert shown == ["yes yes None 3 60"] * 2


def site_with(stage: Stage, **modules: str) -> dict[str, str]:
    """Return variables under which Python finds modules as if they were installed."""
    site = stage.root / "site-packages"
    site.mkdir()
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{site}"}


# In the ways in which libraries do it.
FOLDERS = """
import atexit, os, shutil, tempfile
with open(os.environ["NOTES"], "a") as file:
    A = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, A)
    B = tempfile.TemporaryDirectory()
    C = tempfile.NamedTemporaryFile()
    file.write(f"{os.getpid()} {A} {B.name} {C.name}\\n")
"""
USES_FOLDERS = """
import noted, folders
import os
from tests.launcher import program
open(os.path.join(folders.A, os.environ["RANK"]), "w").close()
print(folders.A, os.path.isdir(folders.B.name), flush=True)
program.main()
"""


@pytest.mark.slow
def test_no_replica_has_temporary_files_of_another_one(stage: Stage) -> None:
    """Nor is any left when they end, or by the forkserver that has made some."""
    own = site_with(stage, folders=FOLDERS, noted=NOTED)
    notes = stage.root / "notes"
    script = stage.root / "train.py"
    script.write_text(USES_FOLDERS)
    options = ["--replicas", 2, "--", stage.root, "--hold", "0:9"]

    def lines() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()]

    with running(stage, *options, script=script, NOTES=str(notes), **own) as job:
        job.wait_until_held(0, 2)
        # By the first forkserver, which was replaced for it, and by each replica.
        makers = [pid for pid, *made in lines() if made]
        assert len(makers) == 3
        assert str(forkserver_of(job.pid)) not in makers
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    told = re.findall(r"(?m)^\[\d\] (\S+) (True|False)$", job.output)
    assert [is_there for _, is_there in told] == ["True"] * 2
    assert len({folder for folder, _ in told}) == 2
    replicas = {str(job.pid_of(0, rank)) for rank in (0, 1)}
    for pid, *made in lines():
        # Nothing takes apart what a replica has at its end.
        removed = made[:2] if pid in replicas else made
        assert not any(map(os.path.exists, removed))


# As lightning does.
PICKS = 'import os\nRANK = os.environ.get("RANK", "0")\nos.environ["PICKED"] = RANK\n'
SHOWS_RANK = """
import noted, picks
import os
print("picked", picks.RANK, os.environ["PICKED"], flush=True)
from tests.launcher import program
program.main()
"""


@pytest.mark.slow
def test_what_an_import_derives_from_the_rank_is_derived_in_each_replica(
    stage: Stage,
) -> None:
    own = site_with(stage, picks=PICKS, noted=NOTED)
    notes = stage.root / "notes"
    script = stage.root / "train.py"
    script.write_text(SHOWS_RANK)
    options = ["--replicas", 2, "--", stage.root, "--hold", "0:9"]
    with running(stage, *options, script=script, NOTES=str(notes), **own) as job:
        job.wait_until_held(0, 2)
        assert scaled(job, 3).returncode == 0
        assert job.wait() == 0, job.events
    shown = re.findall(r"(?m)^\[\d\] picked (\d) (\d)$", job.output)
    assert sorted(shown) == [(rank, rank) for rank in "00112"]
    replicas = {str(job.pid_of(0, rank)) for rank in (0, 1)}
    assert not replicas & set(notes.read_text().split())  # It stands above the cause.


# It is flushed at the end, as by whoever imported it.
LOG = """
import weakref

class Log:
    def __init__(self):
        self.lines = []
        weakref.finalize(self, print, "flushed", self.lines)

LOG = Log()
"""


@pytest.mark.slow
def test_replicas_finalize_what_they_have_inherited(stage: Stage) -> None:
    own = site_with(stage, log=LOG, noted=NOTED)
    notes = stage.root / "notes"
    script = stage.root / "train.py"
    script.write_text(
        "import noted, log\nimport os\nlog.LOG.lines.append(os.getpid())\n"
    )
    with running(stage, "--replicas", 1, script=script, NOTES=str(notes), **own) as job:
        assert job.wait() == 0, job.events
    (flushed,) = re.findall(r"(?m)^\[0\] flushed \[(\d+)\]$", job.output)
    assert flushed not in notes.read_text().split()  # It was imported before the fork.
