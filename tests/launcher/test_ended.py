"""Jobs that have ended are found by their directory, and as the last one here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.launcher.control.jobs import JobError, find_known_job
from tests.report.made import events, write

NOTHING = "no job of this user is running"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a job, and no jobs of the user's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("ELASTICRUN_CHECKPOINT_DIR", raising=False)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def ended(folder: Path) -> Path:
    """A job that has ended there."""
    folder.mkdir()
    write(folder, events())
    return folder


def test_a_job_that_has_ended_is_found_by_its_directory(tmp_path: Path) -> None:
    checkpoints = ended(tmp_path / "a")
    with pytest.raises(JobError, match=f"{NOTHING[:6]} 'digits'"):
        find_known_job("digits")
    assert find_known_job(str(checkpoints)).directory == checkpoints
    assert main(["status", str(checkpoints)]) == 0


def test_a_status_of_nothing_tells_of_the_last_job(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    hint = "to see how one ended, give its checkpoint directory: elasticrun status DIR"
    assert capsys.readouterr().out == f"{NOTHING}; {hint}\n"
    here = ended(elsewhere / "here-checkpoints")
    (here / "checkpoint-00000001").mkdir()
    (here / "checkpoint-00000001" / "manifest.json").touch()
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{NOTHING}; the last one:\n\ntrain.py: finished after ")
    assert f", in {here}\n" in said
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
