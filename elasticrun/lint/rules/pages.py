"""A rule's page: on the terminal, and in docs/rules."""

from __future__ import annotations

import textwrap

from elasticrun.lint.rules.rule import PRELUDE, Rule
from elasticrun.lint.rules.table import RULES

_SEVERITIES = {"E": "error", "W": "warning", "H": "hint (with --pedantic)"}


def listing() -> str:
    """Return all rules, one line each."""
    return "\n".join(
        f"{r.code} {r.severity}  {r.title}" for _, r in sorted(RULES.items())
    )


def terminal_page(rule: Rule) -> str:
    """Return a rule's page as plain text."""
    parts = [
        f"{rule.code} {rule.title} ({_SEVERITIES[rule.severity]})",
        textwrap.fill(rule.why, 80),
        "Wrong:\n\n" + textwrap.indent(rule.wrong.rstrip(), "    "),
        "Right:\n\n" + textwrap.indent(rule.right.rstrip(), "    "),
        textwrap.fill("Help: " + rule.help + ".", 80),
    ]
    return "\n\n".join(parts) + "\n"


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
        f"Severity: {_SEVERITIES[rule.severity]}.",
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
