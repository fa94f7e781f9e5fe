"""Names and texts of a program: sets of words, and expressions as they are written."""

from __future__ import annotations

import ast


def named(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def last_name(node: ast.expr) -> str:
    """Return `c` for `c` and for `a.b.c`, and an empty text for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def written(node: ast.AST) -> str:
    """Return an expression as text, made once for each node."""
    if isinstance(node, ast.Name):
        return node.id
    text: str | None = getattr(node, "_elasticrun_text", None)
    if text is None:
        if isinstance(node, ast.Attribute) and last_name(node.value):
            text = f"{written(node.value)}.{node.attr}"
        else:
            text = ast.unparse(node)
        node._elasticrun_text = text  # type: ignore[attr-defined]
    return text
