"""Each rule finds its wrong script, is silent on its right one, and has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from elasticrun.lint.rules import table
from elasticrun.lint.rules.table import RULES
from tests.docs.documents import links
from tests.docs.test_references import leads_somewhere
from tests.lint.pages import FOLDER, INDEX, PAGES

PEDANTIC = LintOptions(pedantic=True)


@pytest.mark.parametrize("code", PAGES)
def test_the_wrong_script_is_found(code: str) -> None:
    page = PAGES[code]
    result = lint_text(page.prelude + page.wrong)
    assert not result.problems
    found = [each.severity for each in result.findings if each.code == code]
    # Where more depends on it, a rule speaks louder.
    assert {RULES[code].severity, "E"} & {*found}


@pytest.mark.parametrize("code", PAGES)
def test_the_right_script_is_clean(code: str) -> None:
    text = PAGES[code].prelude + PAGES[code].right
    result = lint_text(text)
    assert not result.problems
    assert [finding.message for finding in result.findings] == []
    findings = lint_text(text, options=PEDANTIC).findings
    assert code not in {finding.code for finding in findings}


@pytest.mark.parametrize("code", PAGES)
def test_the_page_says_what_the_rule_says(code: str) -> None:
    rule, text = RULES[code], PAGES[code].text
    assert text.startswith(f"# {code}: {rule.title}\n\n")
    assert f"{rule.help[0].upper()}{rule.help[1:]}." in " ".join(text.split())


def test_the_list_of_rules_has_every_page_and_no_other() -> None:
    rows = [
        f"| [{r.code}]({r.code}.md) | {r.severity} | {r.title} |"
        for r in RULES.values()
    ]
    assert re.findall(r"^\| \[ER.*$", INDEX, re.MULTILINE) == sorted(rows)
    pages = [path for path in FOLDER.iterdir() if path.stem != "index"]
    assert {path.name for path in pages} == {f"{code}.md" for code in RULES}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    assert all(leads_somewhere(link, path) for link in links(path))


def test_every_rule_is_collected() -> None:
    folder = Path(table.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    written = re.findall(r"^(\w+) = Rule\($", "\n".join(texts), re.MULTILINE)
    assert sorted(written) == sorted(RULES)
