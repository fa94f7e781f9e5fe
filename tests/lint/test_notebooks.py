"""Notebooks, standard input, and settings that hold for some files only."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from elasticrun.lint.__main__ import run
from elasticrun.lint.engine import lint_paths, lint_text
from tests.lint.pages import PAGES, PRELUDE

WRONG = PRELUDE + PAGES["ER104"].wrong
LOOP = """\
for epoch in remaining_epochs_until(3):
    open("log.csv", "a").write("x")
    for x in train:
        net(x)"""


def notebook(*cells: str, language: str = "python") -> str:
    """Return a notebook; a cell that begins with # is one of text."""
    kinds = ["markdown" if each.startswith("# ") else "code" for each in cells]
    return json.dumps(
        {
            "cells": [
                {"cell_type": kind, "source": each.splitlines(keepends=True)}
                for kind, each in zip(kinds, cells, strict=True)
            ],
            "metadata": {"language_info": {"name": language}},
            "nbformat": 4,
        }
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let standard input hold a text."""
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)


def test_findings_in_a_notebook_name_the_cell_and_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = notebook("# Training", f"%matplotlib inline\n{PRELUDE}", LOOP)
    (folder / "train.ipynb").write_text(text)
    assert run([str(folder / "train.ipynb").replace(f"{folder}/", "")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "train.ipynb:cell 3:2:5: ER104 file appended in zone A; a restart during the "
        "loop at line 3 of cell 3 appends it again"
    )
    assert lines[1] == '   2 |     open("log.csv", "a").write("x")'
    assert lines[2] == ("   chain: epoch loop cell 3:1 -> loop over train cell 3:3")
    assert run(["train.ipynb", "--format", "json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["cell"], finding["line"], finding["end_line"]) == (3, 2, 2)


def test_comments_in_a_notebook_hide_findings(folder: Path) -> None:
    hidden = LOOP.replace('("x")', '("x")  # elasticrun: ignore[ER104] is meant')
    (folder / "train.ipynb").write_text(notebook(PRELUDE, hidden, "x = 1\nx"))
    assert lint_paths([folder]).findings == []


MAGICS = [
    "!pip install elasticrun",
    "%pip install elasticrun",
    "files = !ls",
    "a, b = %time 1, 2",
    "if True:\n    %time net(1)",
    "net?",
    "?net",
    "%%bash\nls | for",
    "%%time\nfor x in []:\n    net(x)",
]


@pytest.mark.parametrize("cell", MAGICS)
def test_what_is_not_python_keeps_nothing_from_being_found(cell: str) -> None:
    result = lint_text(notebook(PRELUDE, cell, LOOP), "train.ipynb")
    assert result.problems == []
    assert [(each.cell, each.line) for each in result.findings] == [(3, 2)]


def test_what_looks_like_a_magic_in_python_is_python() -> None:
    cell = 'text = """\n!important\n"""\nnumber = (7\n    %len(text))'
    (module,) = lint_text(notebook(cell), "train.ipynb").modules
    assert "!important" in module.text
    assert "%len(text)" in module.text


def test_cells_of_time_magics_are_read(folder: Path) -> None:
    result = lint_text(notebook(PRELUDE, f"%%time\n{LOOP}"), "train.ipynb")
    assert [(each.cell, each.line) for each in result.findings] == [(2, 3)]


def test_a_notebook_that_cannot_be_read_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.ipynb").write_text('{"worksheets": []}')
    assert run(["train.ipynb"]) == 2
    assert "cannot be read as a notebook" in capsys.readouterr().err
    (folder / "train.ipynb").write_text(notebook(PRELUDE, "x = 1", "def broken(:"))
    assert run(["train.ipynb"]) == 2
    assert "train.ipynb:cell 3:1: cannot be parsed" in capsys.readouterr().err
    (folder / "train.ipynb").write_text(notebook(WRONG, language="julia"))
    assert run(["train.ipynb"]) == 0


def test_standard_input_is_linted_as_if_it_stood_in_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, WRONG)
    assert run(["-"]) == 1
    assert capsys.readouterr().out.startswith("stdin.py:")
    (folder / "own").mkdir()
    (folder / "own" / "helper.py").write_text(
        f"{PRELUDE}def log():\n    open('log.csv', 'a').write('x')\n"
    )
    text = LOOP.replace('open("log.csv", "a").write("x")', "helper.log()")
    given(monkeypatch, f"import helper\n{PRELUDE}{text}\n")
    assert run(["-", "--stdin-filename", "own/train.py"]) == 1
    assert capsys.readouterr().out.startswith("own/helper.py:")
    given(monkeypatch, "no notebook")
    assert run(["-", "--stdin-filename", "train.ipynb"]) == 2
    assert "Expecting value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("", ["a.py", "old/b.py", "old/deep/c.py"]),
        ('exclude = ["old"]', ["a.py"]),
        ('exclude = ["old/*.py"]', ["a.py"]),
        ('exclude = ["b.py", "deep"]', ["a.py"]),
    ],
)
def test_files_are_excluded_by_patterns(
    folder: Path, setting: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.py", "old/b.py", "old/deep/c.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(WRONG)
    (folder / "pyproject.toml").write_text(f"[tool.elasticrun.lint]\n{setting}\n")
    run(["."])
    text = capsys.readouterr().out
    assert re.findall(r"^(\S+?):", text, re.MULTILINE) == found


def test_a_file_that_is_named_is_linted_though_it_is_excluded(folder: Path) -> None:
    (folder / "a.py").write_text(WRONG)
    (folder / "pyproject.toml").write_text(
        '[tool.elasticrun.lint]\nexclude = ["a.py"]\n'
    )
    assert run(["."]) == 0
    assert run(["a.py"]) == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("try:\n    pass\nexcept* ValueError:\n    pass", (3, 11)),
        ("type Pair[T] = tuple[T, T]", (3, 12)),
        ("def first[T](items: list[T]) -> T:\n    return items[0]", (3, 12)),
        ("f'{'a'}'", (3, 12)),
        ("try:\n    pass\nexcept ValueError, TypeError:\n    pass", (3, 14)),
        ("t'{1}'", (3, 14)),
    ],
)
def test_syntax_of_a_newer_python_is_told(text: str, version: tuple[int, int]) -> None:
    problems = lint_text(f"import elasticrun\n{text}\n").problems
    if sys.version_info >= version:
        assert problems == []
    else:
        needed = f"Python {version[0]}.{version[1]} or later"
        assert needed in problems[0].message
