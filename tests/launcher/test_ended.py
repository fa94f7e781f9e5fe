"""Jobs that have ended are found: here, by name, and as the last one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.launcher.jobs import find_known_job
from elasticrun.launcher.talk import sockets
from elasticrun.launcher.talk.client import JobError
from elasticrun.launcher.talk.started import note_start, started_lately
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
    sockets.ControlSocket().close()  # As a launcher makes the place for notes.
    return folder


def ended(folder: Path) -> Path:
    """A job that has ended there."""
    folder.mkdir()
    write(folder, events())
    return folder


def test_a_job_that_has_ended_is_found_by_name_and_number(tmp_path: Path) -> None:
    checkpoints = ended(tmp_path / "a")
    with pytest.raises(JobError, match=f"{NOTHING[:6]} 'digits'"):
        find_known_job("digits")
    note_start("digits", checkpoints)
    for word in ("digits", str(os.getpid())):
        assert find_known_job(word).directory == checkpoints
    assert main(["wait", "digits"]) == 0


def test_of_two_jobs_with_one_name_the_newer_one_is_meant(tmp_path: Path) -> None:
    note_start("digits", ended(tmp_path / "a"))
    for note in notes(tmp_path):
        os.utime(note, (1, 1))
    note_start("digits", ended(tmp_path / "b"))
    assert find_known_job("digits").directory == tmp_path / "b"


def test_a_status_of_nothing_tells_of_the_last_job(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    hint = "to see how one ended, give its checkpoint directory: elasticrun status DIR"
    assert capsys.readouterr().out == f"{NOTHING}; {hint}\n"
    checkpoints = ended(tmp_path / "a")
    note_start("digits", checkpoints)
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{NOTHING}; the last one:\n\ntrain.py: finished after ")
    assert f", in {checkpoints}\n" in said
    here = ended(elsewhere / "here-checkpoints")
    (here / "checkpoint-00000001").mkdir()
    (here / "checkpoint-00000001" / "manifest.json").touch()
    assert main(["status"]) == 0
    assert f", in {here}\n" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_notes_are_few_and_may_be_torn(tmp_path: Path) -> None:
    for number in range(25):
        note_start(f"job-{number}", tmp_path / str(number))
        note_start(f"job-{number}", tmp_path / str(number))
    assert len(started_lately()) == len(notes(tmp_path)) == 20
    for note in notes(tmp_path)[:3]:
        note.write_text('{"job": ')
    assert len(started_lately()) == 17


def notes(folder: Path) -> list[Path]:
    return [*folder.glob("elasticrun-*/*.job")]
