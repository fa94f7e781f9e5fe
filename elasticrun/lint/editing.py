"""Changes of a script: in its text, as a patch, and in its tree."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple


class Edit(NamedTuple):
    """One change of a script.

    Attributes:
        node: What the message is about; `text` stands instead of it, or beside it.
        why: What is wrong, and what to write.
        text: What is to be written; empty if that is for the author to find.
        is_certain: Whether it belongs in a patch. If not, the linter alone goes on as
            if it were written.
        place: Beside a statement, `text` is a line of its own, indented like it.
    """

    node: ast.expr | ast.stmt
    why: str
    text: str = ""
    is_certain: bool = True
    place: Literal["instead", "behind", "before"] = "instead"


def patch(name: str, text: str, edits: Iterable[Edit]) -> str:
    """Return the certain edits of a file as a unified diff; empty without any."""
    name += "\t" * (" " in name)  # where a name with a space ends
    before, after = (
        re.findall(r".*\n|.+", each) for each in (text, converted(text, edits))
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(before, after, name, name)
    )


def converted(text: str, edits: Iterable[Edit]) -> str:
    """Return a script with its certain edits; all bytes outside of them are kept."""
    lines = text.encode().splitlines(keepends=True)
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    certain = [each for each in edits if each.is_certain and each.text]
    for edit in sorted(certain, key=_order, reverse=True):
        node, new = edit.node, edit.text.encode()
        first, end = node.lineno - 1, node.end_lineno or node.lineno
        if edit.place == "instead":
            new = lines[first][: node.col_offset] + new
            lines[first:end] = [new + lines[end - 1][node.end_col_offset :]]
            continue
        if not lines[end - 1].endswith((b"\n", b"\r")):
            lines[end - 1] += newline
        indent = lines[first][: -len(lines[first].lstrip())]
        place = end if edit.place == "behind" else first
        lines.insert(place, indent + new + newline)
    return b"".join(lines).decode()


def _order(edit: Edit) -> tuple[int, int]:
    if edit.place == "before":
        return edit.node.lineno, -1
    return edit.node.end_lineno or 0, edit.node.end_col_offset or 0


class Application(ast.NodeTransformer):
    """Changes a tree by all edits; what is new has the lines of what it replaces."""

    def __init__(self, edits: Iterable[Edit]) -> None:
        self._edits = [each for each in edits if each.text]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        nodes = [self.generic_visit(node)]
        for edit in (each for each in self._edits if each.node is node):
            [new] = ast.parse(edit.text).body
            for each in ast.walk(new):
                ast.copy_location(each, node)
            if edit.place == "instead":
                assert isinstance(new, ast.Expr)
                nodes = [new.value]
            else:
                nodes.insert(len(nodes) if edit.place == "behind" else 0, new)
        return nodes if len(nodes) > 1 else nodes[0]


def ends_its_line(body: list[ast.stmt], number: int) -> bool:
    """Return whether a line can be added behind a statement of a body."""
    end = body[number].end_lineno or 0
    return number + 1 == len(body) or body[number + 1].lineno > end
