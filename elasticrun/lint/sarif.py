"""Findings as SARIF 2.1.0, which code hosts and editors read."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from elasticrun.lint.engine import LintResult
from elasticrun.lint.finding import Finding
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.table import RULES

_LEVELS = {"E": "error", "W": "warning", "H": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(result: LintResult) -> dict[str, Any]:
    """Return a log with one run."""
    codes = sorted({each.code for each in result.findings})
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "elasticrun lint",
                        "rules": [_rule(RULES[code]) for code in codes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(each, codes) for each in result.findings],
                "invocations": [
                    {
                        "executionSuccessful": not result.problems,
                        "toolExecutionNotifications": [
                            {
                                "level": "error",
                                "message": {"text": f"{each.path}: {each.message}"},
                            }
                            for each in result.problems
                        ],
                    }
                ],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.help},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(finding: Finding, codes: list[str]) -> dict[str, Any]:
    text = f"{finding.message}. {finding.help[:1].upper()}{finding.help[1:]}."
    if finding.chain:
        text += f" Chain: {finding.chain}."
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.path)},
                    "region": {
                        "startLine": finding.line,
                        "startColumn": finding.column,
                        "endLine": finding.end_line,
                        "endColumn": max(
                            finding.end_column,
                            finding.column + 1
                            if finding.end_line == finding.line
                            else 1,
                        ),
                    },
                }
            }
        ],
        "properties": {"zone": finding.zone},
    }


def _uri(path: str) -> str:
    pure = PurePath(path)
    return pure.as_uri() if pure.is_absolute() else quote(pure.as_posix())
