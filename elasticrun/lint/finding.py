"""What the linter reports, and by which rules; their pages say more (lint/pages/)."""

from __future__ import annotations

import ast
from typing import NamedTuple

from elasticrun.lint.project import Module

SEVERITIES = "EWH"  # error, warning, hint


class Rule(NamedTuple):
    """What one rule says beside a finding.

    Attributes:
        head: Its code, its severity, and its title. The severity is `E`, `W`, or `H`
            for a hint, which only `--pedantic` shows.
    """

    head: str
    help: str

    @property
    def code(self) -> str:
        return self.head[:5]

    @property
    def severity(self) -> str:
        return self.head[6]

    @property
    def title(self) -> str:
        return self.head[8:]


class Finding(NamedTuple):
    """One finding at one place."""

    code: str
    severity: str
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    zone: str
    source: str
    chain: str
    help: str

    @property
    def place(self) -> str:
        """Where it is, as the beginning of a message."""
        return f"{self.path}:{self.line}:{self.column}"

    @property
    def order(self) -> tuple[str, int, int, str]:
        return (self.path, self.line, self.column, self.code)


def lowered(severity: str) -> str:
    """Return a severity said less loudly."""
    return "W" if severity == "E" else "H"


def place_of(node: ast.AST, module: Module) -> tuple[int, int, int, int]:
    """Return line, column, end line and end column of a node, columns from 1."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        column = node.col_offset + 1
        return node.lineno, column, node.lineno, column + len(node.name)
    line = getattr(node, "lineno", 1)
    start = _characters(module.line(line), getattr(node, "col_offset", 0))
    end_line = getattr(node, "end_lineno", None) or line
    end = _characters(
        module.line(end_line), getattr(node, "end_col_offset", None) or start
    )
    return line, start + 1, end_line, end + 1


def _characters(text: str, offset: int) -> int:
    """Return a column in characters for one in UTF-8 bytes."""
    if text.isascii():
        return offset
    return len(text.encode()[:offset].decode(errors="ignore"))
