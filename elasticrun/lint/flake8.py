"""The linter as a plugin of flake8: the same findings, under the same codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


class Plugin:
    """What flake8 calls for each file; its own selection and `noqa` apply."""

    name = "elasticrun"
    version = "1"

    def __init__(self, tree: ast.AST, filename: str = "-", lines: Any = ()) -> None:
        self.tree = tree
        self.filename = filename
        self.lines = list(lines)

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield line, column, text and this class for each finding in the file."""
        from pathlib import Path

        from elasticrun.lint.engine import lint_paths, lint_text

        path = Path(self.filename)
        if path.is_file():
            result = lint_paths([path])
        else:
            result = lint_text("".join(self.lines), name="stdin.py")
        for finding in result.findings:
            if finding.path in (str(path), "stdin.py"):
                text = f"{finding.code} {finding.message}"
                yield finding.line, finding.column - 1, text, type(self)
