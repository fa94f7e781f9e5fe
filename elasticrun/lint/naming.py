"""Names and texts of a program: sets of words, and expressions as they are written."""

from __future__ import annotations

import ast


def named(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def written(node: ast.AST) -> str:
    """Return an expression as text, made once for each node."""
    text: str | None = getattr(node, "_elasticrun_text", None)
    if text is None:
        text = ast.unparse(node)
        node._elasticrun_text = text  # type: ignore[attr-defined]
    return text
