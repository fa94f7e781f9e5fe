"""Scripts in the styles that people write: silent as they are, loud with a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from tests.lint.mistakes import Mistake, read_mistakes

STYLES = Path(__file__).parent / "styles"
SCRIPTS = sorted(STYLES.glob("*.py"))
MISTAKES = read_mistakes(STYLES / "mistakes.diff")


def codes_in(text: str, name: str, *, pedantic: bool = False) -> list[tuple[str, int]]:
    result = lint_text(text, name=f"{name}.py", options=LintOptions(pedantic=pedantic))
    assert not result.problems
    return [(each.code, each.line) for each in result.findings]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_correct_script_has_no_findings(path: Path) -> None:
    assert codes_in(path.read_text(encoding="utf-8"), path.stem) == []


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    text = (STYLES / f"{mistake.script}.py").read_text(encoding="utf-8")
    found = {code for code, _ in codes_in(mistake.plant(text), mistake.script)}
    assert found & mistake.codes
