"""The scripts of docs/ports with the linter's patch, and what is left to a hand."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from elasticrun.lint.editing import converted
from elasticrun.lint.engine import lint_text
from elasticrun.lint.rules.conversion import edits_of
from tests.docs.documents import ROOT, side_of
from tests.docs.test_ports import DRAWING, PORTS, check_restarts, diff_of

FOLDER = Path(__file__).with_name("after_patch")
# What the patch makes right wherever it changes a script.
SPARED = {"ER302", "ER304", "ER403"}


def patched(name: str) -> str:
    text = side_of(diff_of(name), "-")
    return converted(text, edits_of(ast.parse(text), text)) + "\n"


def left(name: str) -> str:
    """Return the diff that a hand writes behind the patch; empty if none is needed."""
    path = FOLDER / f"{name}.diff"
    return path.read_text() if path.exists() else ""


def finished(name: str, directory: Path) -> str:
    """Return a script with the patch and what is written by hand."""
    script = directory / "train.py"
    script.write_text(patched(name))
    if left(name):
        command = ["git", "apply", "-p0", "--unidiff-zero"]
        subprocess.run(command, cwd=directory, input=left(name), text=True, check=True)
    return script.read_text()


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("name", PORTS)
def test_patch_and_a_few_lines_go_through_restarts(name: str, tmp_path: Path) -> None:
    before = side_of(diff_of(name), "-")
    check_restarts(before, finished(name, tmp_path), tmp_path, draws=name in DRAWING)


@pytest.mark.parametrize("name", PORTS)
def test_what_is_left_fits_the_patch(name: str, tmp_path: Path) -> None:
    found = lint_text(finished(name, tmp_path)).findings
    assert not {each.code for each in found} & {*SPARED, "ER002", "ER003"}


def test_recipe_says_how_many_lines_are_left() -> None:
    recipe = (ROOT / "docs" / "howto" / "convert.md").read_text()
    said = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", recipe, re.M)
    counted = {
        name: tuple(
            len(re.findall(rf"^[{sign}](?![+-]{{2}} )", left(name), re.M))
            for sign in ("+", "-")
        )
        for name in PORTS
    }
    assert {name: (int(new), int(old)) for name, new, old in said} == counted
    many = {name for name, (new, _) in counted.items() if new > 5}
    assert many <= {"fixmatch"}  # which has meters
