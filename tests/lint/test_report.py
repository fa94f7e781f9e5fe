"""The formats, the exit status, suppressions and settings."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from elasticrun.lint.command import rule_main, run
from elasticrun.lint.engine import lint_text
from elasticrun.lint.rules.table import RULES
from tests.lint.pages import PAGES, PRELUDE

WRONG = PRELUDE + PAGES["ER104"].wrong
RIGHT = PRELUDE + PAGES["ER104"].right
WRITING = '    with open("log.csv", "a") as file:'
LOOP = """\
for epoch in remaining_epochs_until(3):
    open("log.csv", "a").write("x")
    for x in train:
        net(x)"""
LINE = WRONG.splitlines().index(WRITING) + 1


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(WRONG, encoding="utf-8")
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments]) == 1
    return capsys.readouterr().out


def test_text_says_where_why_and_what_to_do(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(capsys, "train.py").splitlines()
    loop = LINE + 2
    assert lines[0] == (
        f"train.py:{LINE}:10: ER104 file appended in zone B; a restart during "
        f"the loop at line {loop} appends it again"
    )
    assert lines[1] == f"   {LINE} | {WRITING}"
    assert lines[2] == f"   chain: epoch loop {LINE - 3} -> loop over valid {loop}"
    assert lines[3].startswith("   help: make it a LogFile")
    assert lines[3].endswith("elasticrun rule ER104")


def test_the_chain_goes_through_calls(tmp_path: Path) -> None:
    text = PRELUDE + (
        "class Trainer:\n"
        "    def evaluate(self):\n        for x in valid:\n            net(x)\n"
        "    def run_epoch(self):\n        for x in train:\n            net(x)\n"
        "        open('log.csv', 'a').write('x')\n        self.evaluate()\n"
        "def fit(trainer):\n"
        "    for epoch in remaining_epochs_until(3):\n        trainer.run_epoch()\n"
        "fit(Trainer())\n"
    )
    (finding,) = lint_text(text).findings
    start = PRELUDE.count("\n")
    # How the epoch loop itself is come to is not said.
    assert finding.chain.startswith(
        f"epoch loop {start + 11} -> run_epoch {start + 12} -> evaluate {start + 9} -> "
        f"loop over valid {start + 3}"
    )


def test_json_has_everything(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = json.loads(output(capsys, "train.py", "--format", "json"))
    (finding,) = log["findings"]
    assert log["problems"] == []
    assert log["elastic"] == [finding["path"]]
    assert (finding["code"], finding["severity"], finding["zone"]) == (
        "ER104",
        "E",
        "B",
    )
    assert (finding["line"], finding["column"]) == (LINE, 10)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_clean_script_exits_with_0(script: Path, form: str) -> None:
    script.write_text(RIGHT, encoding="utf-8")
    assert run(["train.py", "--format", form]) == 0


def test_what_cannot_be_linted_exits_with_2(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["nowhere.py"]) == 2
    assert "nowhere.py:1: does not exist" in capsys.readouterr().err
    script.write_text(WRONG + "def broken(:\n", encoding="utf-8")
    assert run(["train.py"]) == 2
    assert "cannot be parsed" in capsys.readouterr().err
    script.write_bytes(b"# coding: nonsense\nimport elasticrun\n")
    assert run(["train.py"]) == 2


def test_scripts_that_are_not_elastic_are_told_what_to_change(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = WRONG.replace("elasticrun", "other").replace("Adaptive", "Plain")
    script.write_text(
        plain.replace("remaining_epochs_until", "range"), encoding="utf-8"
    )
    assert run(["train.py"]) == 1
    assert "ER003" in capsys.readouterr().out
    assert run(["train.py", "--ignore", "ER"]) == 0


def test_codes_are_selected_and_ignored(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train.py", "--select", "ER2"]) == 0
    assert run(["train.py", "--select", "ER1,ER2"]) == 1
    assert run(["train.py", "--ignore", "ER104"]) == 0
    with pytest.raises(SystemExit) as raised:
        run(["train.py", "--select", "XX"])
    assert raised.value.code == 2
    assert "XX begins no rule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comment", "is_hidden"),
    [
        ("ignore[ER104] twice is meant", True),
        ("ignore[ER102, ER104]", True),
        ("ignore", True),
        ("ignore[ER102]", False),
    ],
)
def test_a_comment_keeps_a_line_from_being_reported(
    comment: str, is_hidden: bool
) -> None:
    behind = f"{WRITING}  # elasticrun: {comment}"
    above = f"    # elasticrun: {comment}\n{WRITING}"
    before = f"    before = 1  # elasticrun: {comment}\n{WRITING}"
    for text, hides in ((behind, is_hidden), (above, is_hidden), (before, False)):
        findings = lint_text(WRONG.replace(WRITING, text)).findings
        assert [each.code for each in findings] == ["ER104"] * (not hides)


def test_settings_come_from_pyproject(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pyproject = script.with_name("pyproject.toml")
    pyproject.write_text('[tool.elasticrun.lint]\nignore = ["ER104"]\n')
    assert run(["train.py"]) == 0
    pyproject.write_text('[tool.elasticrun.lint]\nignroe = ["ER104"]\n')
    assert run(["train.py"]) == 2
    assert "ignroe = ['ER104'] is not a setting" in capsys.readouterr().err
    pyproject.write_text("[tool.elasticrun.lint\n")
    assert run(["train.py"]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
    pyproject.write_text("[tool.other\n")
    assert run(["train.py"]) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_settings_of_somebody_else_do_not_count(script: Path) -> None:
    pyproject = script.with_name("pyproject.toml")
    pyproject.write_text('[tool.elasticrun.lint]\nignore = ["ER104"]\n')
    os.chown(pyproject, 65534, 65534)
    assert run(["train.py"]) == 1


# The commands around.


def test_rules_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from argparse import Namespace

    assert rule_main(Namespace(codes=["er104"])) == 0
    page = capsys.readouterr().out
    assert "Wrong:" in page
    assert "Right:" in page
    assert rule_main(Namespace(codes=[])) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RULES)
    assert rule_main(Namespace(codes=["ER999"])) == 2
    assert "there is no rule ER999" in capsys.readouterr().err


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let standard input hold a text."""
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)


def test_standard_input_is_linted_as_if_it_stood_in_its_file(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, WRONG)
    assert run(["-"]) == 1
    assert capsys.readouterr().out.startswith("stdin.py:")
    (script.parent / "own").mkdir()
    (script.parent / "own" / "helper.py").write_text(
        f"{PRELUDE}def log():\n    open('log.csv', 'a').write('x')\n"
    )
    text = LOOP.replace('open("log.csv", "a").write("x")', "helper.log()")
    given(monkeypatch, f"import helper\n{PRELUDE}{text}\n")
    assert run(["-", "--stdin-filename", "own/train.py"]) == 1
    assert capsys.readouterr().out.startswith("own/helper.py:")


def test_a_notebook_is_refused_in_words(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.with_name("train.ipynb").write_text('{"cells": []}')
    assert run(["train.ipynb"]) == 2
    assert '`nbqa "elasticrun lint" train.ipynb`' in capsys.readouterr().err
    script.unlink()
    assert run(["."]) == 0
