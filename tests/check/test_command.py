"""What `elasticrun check` says of wrong usage, and when it has done enough."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.check import checker
from tests.check.checking import SCRIPTS


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--at", "first"), "EPOCH:LOOP:BATCH"),
        (("--at", "0:0:0"), "counted from 1"),
        (("--replicas", "none"), "numbers from 1 up"),
        (("--replicas", "1,2,3", "--at", "0:0:1"), "2 generations"),
        (("--max-batches", "-1"), "or 0 for all"),
        (("--link", "data"), "there is no such file or folder"),
        (("--hang-timeout", "soon"), "give seconds above 0"),
    ],
)
def test_wrong_usage_says_what_is_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["check", *options, "train.py"]) == 2
    assert text in capsys.readouterr().out


def test_a_script_that_is_not_elastic_is_refused_before_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nopen('began', 'w')\nfor epoch in range(3):\n"
        "    for x in loader:\n        net(x).backward()\n"
    )
    assert main(["check", str(script)]) == 2
    said = capsys.readouterr().out
    assert f"`elasticrun lint {script}` says what to change" in said
    assert "0 runs" in said


@pytest.mark.slow
@pytest.mark.wide
def test_after_so_many_runs_no_cause_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(SCRIPTS / "replayed.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checker, "MOST_RUNS", 3)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of the tests stays
    small = ("--replicas", "1", "--max-epochs", "2", "--max-batches", "2")
    assert main(["check", "--at", "1:1:1", *small, "replayed.py"]) == 1
    said = capsys.readouterr().out
    assert "note: not every cause was looked for, since there were 3 runs" in said
    assert "(3 runs, " in said
