"""The rules' pages, and the scripts that stand in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from elasticrun.lint.rules.table import RULES

FOLDER = Path(__file__).resolve().parents[2] / "elasticrun" / "lint" / "pages"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
_SCRIPT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the examples of the rules take for granted.
(PRELUDE,) = _SCRIPT.findall(INDEX)


class Page(NamedTuple):
    """A rule's page: its text, and its scripts, which stand behind the prelude."""

    text: str
    prelude: str
    wrong: str
    right: str


def read_page(code: str) -> Page:
    """Return the page of a rule."""
    text = (FOLDER / f"{code}.md").read_text(encoding="utf-8")
    wrong, right = _SCRIPT.findall(text)
    return Page(text, "" if code == "ER003" else PRELUDE, wrong, right)


PAGES = {code: read_page(code) for code in sorted(RULES)}
