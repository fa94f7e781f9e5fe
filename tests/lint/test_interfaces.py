"""What other tools meet: the hook, and the voice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths, lint_text
from elasticrun.lint.options import LintOptions
from tests.lint.pages import PAGES, PRELUDE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_hook_of_pre_commit_lints(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("pre-commit takes its hooks from a repository")
    (tmp_path / "wrong.py").write_text(PRELUDE + PAGES["ER104"].wrong, encoding="utf-8")
    (tmp_path / "right.py").write_text(PRELUDE + PAGES["ER104"].right, encoding="utf-8")
    programs = Path(sys.executable).parent
    own = {"PRE_COMMIT_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def hook(name: str) -> subprocess.CompletedProcess[str]:
        words = ["try-repo", ROOT, "elasticrun-lint", "--files", name]
        return subprocess.run(
            [programs / "pre-commit", *words],
            cwd=tmp_path,
            env={**os.environ, **own, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    found = hook("wrong.py")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "wrong.py:" in found.stdout
    assert "ER104" in found.stdout
    clean = hook("right.py")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "Passed" in clean.stdout


def test_the_examples_have_no_findings() -> None:
    result = lint_paths([ROOT / "examples"], LintOptions(pedantic=True))
    assert result.modules
    assert result.findings == []
    assert result.problems == []


# The voice.

BODY = (
    "    register(thing={0})\n    {0}.step()\n"
    "    for epoch in remaining_epochs_until(3):\n"
    "        for x in train:\n            net(x)\n"
)


def test_a_name_alone_says_nothing() -> None:
    known = PRELUDE + "def main():\n" + BODY.format("scheduler")
    named = PRELUDE + "def main(lr_scheduler):\n" + BODY.format("lr_scheduler")
    assert [each.severity for each in lint_text(known).findings] == ["E"]
    assert lint_text(named).findings == []


def test_what_an_imported_file_does_is_said_less_loudly(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "helper.py"
    script.write_text("import helper\nhelper.main()\n", encoding="utf-8")
    body = (PRELUDE + PAGES["ER104"].wrong).replace("\n", "\n    ")
    helper.write_text(f"def main():\n    {body}\n", encoding="utf-8")
    assert [each.severity for each in lint_paths([script]).findings] == ["W"]
    assert [each.severity for each in lint_paths([tmp_path]).findings] == ["E"]


def test_what_both_branches_of_a_rank_test_make_is_made_anyway() -> None:
    text = (
        "import elasticrun\n"
        "if elasticrun.rank() == 0:\n"
        "    data = download()\n"
        "    loader = elasticrun.AdaptiveDataLoader(data, 64)\n"
    )
    other = "else:\n    loader = elasticrun.AdaptiveDataLoader(cached(), 64)\n"
    loop = (
        "for epoch in elasticrun.remaining_epochs_until(3):\n"
        "    for x in loader:\n        print(x)\n"
    )
    assert [each.code for each in lint_text(text + loop).findings] == ["ER402"]
    assert lint_text(text + other + loop).findings == []
