"""ER001, and which comments hide which findings."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.project import Module

ER001 = Rule(
    "ER001 W unused suppression",
    help="remove the comment",
)


def is_suppressed(
    finding: Finding, module: Module | None, used: set[tuple[str, int, str]]
) -> bool:
    """Return whether a comment hides a finding; note in `used` which one it was."""
    if module is None:
        return False
    for line in dict.fromkeys((finding.line, finding.end_line, finding.line - 1)):
        entry = module.suppressions.get(line)
        if entry is None:
            continue
        codes, column = entry
        if line == finding.line - 1 and module.line(line)[:column].strip():
            continue  # a comment behind code speaks for that line only
        if codes is None or finding.code in codes:
            used.add((finding.path, line, finding.code))
            return True
    return False


def unused(module: Module, used: set[tuple[str, int, str]]) -> Iterator[Finding]:
    """Yield the suppressions of a module that have hidden nothing."""
    for line, (codes, column) in module.suppressions.items():
        here = {code for path, at, code in used if path == module.name and at == line}
        unused = sorted(codes - here) if codes is not None else []
        if not unused and (codes or here):
            continue
        text = module.line(line)
        what = ", ".join(unused) or "anything"
        message = f"nothing is found here for this comment to suppress: {what}"
        yield Finding(
            ER001.code, ER001.severity, module.name, line, column + 1, line,
            len(text) + 1, message, "", text, "", ER001.help,
        )  # fmt: skip
