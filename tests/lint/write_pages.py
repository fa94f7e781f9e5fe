"""Write docs/rules from what the rules say: `python -m tests.lint.write_pages`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from elasticrun.lint.command import SEVERITIES
from elasticrun.lint.rules.rule import PRELUDE, Rule
from elasticrun.lint.rules.table import RETIRED, RULES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "rules"

_BEGINNING = "index.md#how-the-examples-begin"
_INTRODUCTION = """\
E is an error, W a warning, H a hint that only `--pedantic` shows. What is
known only by its name is reported one level lower. The model behind the rules
is in [idempotency.md](../idempotency.md)."""


def markdown_page(rule: Rule) -> str:
    """Return a rule's page for the documentation."""
    help_text = rule.help[:1].upper() + rule.help[1:]
    parts = [
        f"# {rule.code}: {rule.title}",
        f"Severity: {SEVERITIES[rule.severity]}.",
        textwrap.fill(rule.why, 88),
        "Wrong:",
        f"```text\n{rule.wrong.rstrip()}\n```",
        "Right:",
        f"```text\n{rule.right.rstrip()}\n```",
        textwrap.fill(f"{help_text}.", 88),
    ]
    if rule.prelude == PRELUDE:
        parts.append(f"The scripts begin as in [the list of rules]({_BEGINNING}).")
    return "\n\n".join(parts) + "\n"


def markdown_index() -> str:
    """Return the list of rules for the documentation."""
    rows = [
        f"| [{r.code}]({r.code}.md) | {r.severity} | {r.title} |"
        for _, r in sorted(RULES.items())
    ]
    return "\n".join(
        [
            "# Rules of `elasticrun lint`",
            "",
            _INTRODUCTION,
            "",
            "| code | | what it finds |",
            "| --- | --- | --- |",
            *rows,
            "",
            "## Retired",
            "",
            "These codes find nothing. They may still stand in settings and comments.",
            "",
            *(f"- {code}: {text}" for code, text in sorted(RETIRED.items())),
            "",
            "## How the examples begin",
            "",
            f"```text\n{PRELUDE.rstrip()}\n```",
            "",
        ]
    )


def pages() -> dict[str, str]:
    """Return every file of docs/rules by its name."""
    files = {f"{rule.code}.md": markdown_page(rule) for rule in RULES.values()}
    return {"index.md": markdown_index(), **files}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
