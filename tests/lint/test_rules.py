"""Each rule finds its wrong script, is silent on its right one, and has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from elasticrun.lint.rules import table
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.table import RULES
from tests.lint.write_pages import pages

DOCS = Path(__file__).resolve().parents[2] / "docs"
EVERY = [pytest.param(rule, id=code) for code, rule in sorted(RULES.items())]


@pytest.mark.parametrize("rule", EVERY)
def test_the_wrong_script_is_found(rule: Rule) -> None:
    result = lint_text(rule.prelude + rule.wrong, options=LintOptions(pedantic=True))
    assert not result.problems
    assert rule.code in {finding.code for finding in result.findings}


@pytest.mark.parametrize("rule", EVERY)
def test_the_right_script_is_clean(rule: Rule) -> None:
    result = lint_text(rule.prelude + rule.right)
    assert not result.problems
    assert [finding.message for finding in result.findings] == []
    pedantic = lint_text(rule.prelude + rule.right, options=LintOptions(pedantic=True))
    assert rule.code not in {finding.code for finding in pedantic.findings}


@pytest.mark.parametrize("rule", EVERY)
def test_the_examples_are_python(rule: Rule) -> None:
    compile(rule.prelude + rule.wrong, rule.code, "exec")
    compile(rule.prelude + rule.right, rule.code, "exec")


def test_the_pages_say_what_the_rules_say() -> None:
    expected = pages()
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in (DOCS / "rules").glob("*.md")
    }
    assert found == expected, "write them: python -m tests.lint.write_pages"


def test_every_rule_is_collected() -> None:
    folder = Path(table.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    written = re.findall(r"^(\w+) = Rule\($", "\n".join(texts), re.MULTILINE)
    assert sorted(written) == sorted(RULES)
