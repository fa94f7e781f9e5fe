"""What the launcher makes of a checkpoint directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.launcher import directory
from elasticrun.launcher.options import (
    OptionError,
    Program,
)
from tests.support.stores import STATES, acquired, manifest, write_all


def commit(path: Path, number: int) -> None:
    folder = path / f"checkpoint-{number:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def test_only_the_same_program_is_finished(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("epochs = 3")
    own = tmp_path / "own"
    commit(own, 7)
    program = Program("script", str(script), ("--lr", "1"), ())
    assert directory.finished_at(own, program) is None
    directory.write_finished(own, program)
    assert directory.finished_at(own, program) is not None
    other = Program("script", str(script), ("--lr", "2"), ())
    assert directory.finished_at(own, other) is None
    script.write_text("epochs = 4")
    assert directory.finished_at(own, program) is None
    script.write_text("epochs = 3")
    commit(own, 8)
    assert directory.finished_at(own, program) is None


@pytest.mark.parametrize("name", ["pack.train", "pack"])
def test_a_module_that_has_changed_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    for file in ("__main__.py", "train.py"):
        (tmp_path / "pack" / file).write_text("epochs = 3")
    own = tmp_path / "own"
    commit(own, 7)
    program = Program("module", name, (), (str(tmp_path),))
    directory.write_finished(own, program)
    assert directory.finished_at(own, program) is not None
    file = "train.py" if name == "pack.train" else "__main__.py"
    (tmp_path / "pack" / file).write_text("epochs = 4")
    assert directory.finished_at(own, program) is None


def test_what_was_left_to_replicas_that_never_came_is_forced(tmp_path: Path) -> None:
    said: list[str] = []
    directory.force_newest(tmp_path, said.append)  # There is nothing.
    with acquired(tmp_path) as store:
        draft = store.begin(1, is_forced=False)
        left = draft.commit(manifest(1, *write_all(draft, STATES)))
        assert store.is_unforced(left)
        assert not said
        directory.force_newest(tmp_path, said.append)
        assert not store.is_unforced(left)
        directory.force_newest(tmp_path, said.append)
        assert said == ["forcing checkpoint 1 to the disk"]


def test_what_has_become_a_link_is_left_to_the_next_start(tmp_path: Path) -> None:
    with acquired(tmp_path) as store:
        draft = store.begin(1, is_forced=False)
        left = draft.commit(manifest(1, *write_all(draft, STATES)))
        model = Path(left.path) / "model"
        model.rename(tmp_path / "model")
        model.symlink_to(tmp_path / "model")
        said: list[str] = []
        directory.force_newest(tmp_path, said.append)
        assert store.is_unforced(left)
        assert "checkpoint 1 may not survive a power cut" in said[-1]


def test_a_directory_in_use_is_not_moved(tmp_path: Path) -> None:
    own = tmp_path / "own"
    commit(own, 1)
    lock = own / "launcher.lock"
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+');"
        "fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True);"
        "sys.stdin.read()"
    )
    lock.touch()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OptionError, match="another job is running with .*/own "):
            directory.move_aside(own)
        holder.communicate()
    assert directory.move_aside(own) == tmp_path / "own.old-1"
    commit(own, 1)
    for name in ("streams", "log-files"):  # What jobs keep beside checkpoints.
        (own / name).mkdir()
    assert directory.move_aside(own) == tmp_path / "own.old-2"
