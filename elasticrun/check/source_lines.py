"""Lines of the program's source, for reports."""

from __future__ import annotations

import ast
from pathlib import Path


def end_of_block(path: str, line: int) -> int:
    """Return the last line of the `with` statement that begins at a line."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return line
    ends = [
        node.end_lineno or line
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and node.lineno == line
    ]
    return max(ends, default=line)


def source_line(path: str, line: int) -> str:
    """Return one line of a file; nothing if there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return lines[line - 1] if 0 < line <= len(lines) else ""
