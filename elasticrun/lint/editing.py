"""Changes of a script's tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Literal, NamedTuple


class Edit(NamedTuple):
    """One change of a script.

    Attributes:
        why: What is wrong with the node as it is.
        text: The code that the linter goes on with; empty if the author must find it.
        place: Whether it stands instead of the node, or behind it.
    """

    node: ast.expr | ast.stmt
    why: str
    help: str
    text: str = ""
    place: Literal["instead", "behind"] = "instead"


class Application(ast.NodeTransformer):
    """Changes a tree by edits; what is new has the lines of what it replaces."""

    def __init__(self, edits: Iterable[Edit]) -> None:
        self._edits = [each for each in edits if each.text]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        nodes = [self.generic_visit(node)]
        for edit in (each for each in self._edits if each.node is node):
            [new] = ast.parse(edit.text).body
            for each in ast.walk(new):
                ast.copy_location(each, node)
            if edit.place == "behind":
                nodes.append(new)
            else:
                nodes = [new.value if isinstance(new, ast.Expr) else new]
                if isinstance(new, ast.For) and isinstance(node, ast.While):
                    new.body = node.body
        return nodes if len(nodes) > 1 else nodes[0]
