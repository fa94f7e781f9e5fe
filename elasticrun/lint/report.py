"""Findings as text, as JSON, or as annotations of GitHub's."""

from __future__ import annotations

import json
from typing import Any

from elasticrun.lint.engine import LintProblem, LintResult
from elasticrun.lint.finding import Finding

_GITHUB = {"E": "error", "W": "warning", "H": "notice"}


def report(result: LintResult, form: str) -> str:
    """Return all findings in one of the forms that the command line offers."""
    if form == "json":
        return json.dumps(as_json(result), indent=2)
    as_lines = {"text": _text, "github": _github}[form]
    lines = [as_lines(each) for each in result.findings]
    if form == "github":
        lines += [_github_problem(each) for each in result.problems]
    return "\n".join(lines)


def concise(finding: Finding) -> str:
    """Return a finding on one line."""
    return f"{finding.place}: {finding.code} {finding.message}"


def problem_line(problem: LintProblem) -> str:
    """Return a problem on one line."""
    return f"{problem.path}:{problem.line}: {problem.message}"


def _text(finding: Finding) -> str:
    lines = [concise(finding)]
    if finding.source.strip():
        lines.append(f"   {finding.line} | {finding.source.rstrip()}")
    if finding.chain:
        lines.append(f"   chain: {finding.chain}")
    pointer = f"elasticrun rule {finding.code}"
    lines.append(f"   help: {finding.help:<60} {pointer}")
    return "\n".join(lines)


def as_json(result: LintResult) -> dict[str, Any]:
    """Return the findings and problems as plain values."""
    return {
        "version": 1,
        "findings": [
            {key: value for key, value in each._asdict().items() if key != "source"}
            for each in result.findings
        ],
        "problems": [each._asdict() for each in result.problems],
        "elastic": [each.name for each in result.modules if each.leads_to_elastic],
    }


def _github(finding: Finding) -> str:
    position = (
        f"file={_property(finding.path)},line={finding.line},col={finding.column}"
    )
    text = _data(f"{finding.message}. Help: {finding.help}")
    level = _GITHUB[finding.severity]
    return f"::{level} {position},title=elasticrun {finding.code}::{text}"


def _github_problem(problem: LintProblem) -> str:
    position = f"file={_property(problem.path)},line={problem.line}"
    return f"::error {position},title=elasticrun::{_data(problem.message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
