"""What `elasticrun rule` prints: a list, or a rule's page."""

from __future__ import annotations

import textwrap

from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.table import RULES

SEVERITIES = {"E": "error", "W": "warning", "H": "hint (with --pedantic)"}


def listing() -> str:
    """Return all rules, one line each."""
    return "\n".join(
        f"{r.code} {r.severity}  {r.title}" for _, r in sorted(RULES.items())
    )


def terminal_page(rule: Rule) -> str:
    """Return a rule's page as plain text."""
    parts = [
        f"{rule.code} {rule.title} ({SEVERITIES[rule.severity]})",
        textwrap.fill(rule.why, 80),
        "Wrong:\n\n" + textwrap.indent(rule.wrong.rstrip(), "    "),
        "Right:\n\n" + textwrap.indent(rule.right.rstrip(), "    "),
        textwrap.fill("Help: " + rule.help + ".", 80),
    ]
    return "\n\n".join(parts) + "\n"
