"""Changes of a script: in its text, as a patch, and in its tree."""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple


class Edit(NamedTuple):
    """One change of a script.

    Attributes:
        node: What the message is about; `text` stands instead of it, or beside it.
        why: What is wrong, and what to write; empty for what is in the patch alone,
            since other rules speak of it.
        text: What is to be written; empty if that is for the author to find, or,
            without a `why`, if nothing is to stand there.
        is_certain: Whether it belongs in a patch. If not, the linter alone goes on as
            if it were written.
        place: Beside a statement, `text` is lines of their own, indented like it; with
            "indent" it stands in front of each of the statement's lines.
    """

    node: ast.expr | ast.stmt
    why: str
    text: str = ""
    is_certain: bool = True
    place: Literal["instead", "behind", "before", "indent"] = "instead"

    @property
    def is_in_patch(self) -> bool:
        return self.is_certain and bool(self.text or not self.why)


def inserted(node: ast.AST, text: str, *, behind: bool) -> Edit:
    """Return the edit that adds a text directly before or behind an expression."""
    prefix = "end_" if behind else ""
    line, column = (
        getattr(node, f"{prefix}{each}") for each in ("lineno", "col_offset")
    )
    spot = ast.Name(
        "", lineno=line, col_offset=column, end_lineno=line, end_col_offset=column
    )
    return Edit(spot, "", text)


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
    certain = [each for each in edits if each.is_in_patch]
    source = text.encode()
    lines = source.splitlines(keepends=True)
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    is_cut = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
    ends = {each.node.end_lineno for each in certain if each.place == "behind"}
    if is_cut and len(lines) in ends:
        lines[-1] += newline
    starts = [0, *itertools.accumulate(map(len, lines))]
    source, done, parts = b"".join(lines), 0, []
    changes = (each for edit in certain for each in _changes(edit, lines, newline))
    for line, column, _, end_line, end_column, new in sorted(changes):
        begin, end = starts[line] + column, starts[end_line] + end_column
        if begin >= done:  # else what stood here is gone
            parts += [source[done:begin], new]
            done = end
    return b"".join([*parts, source[done:]]).decode()


_Change = tuple[int, int, tuple[int, int], int, int, bytes]


def _changes(edit: Edit, lines: list[bytes], newline: bytes) -> Iterator[_Change]:
    """Yield where a text begins, its order there, where it ends, and the new one."""
    node = edit.node
    first, end = node.lineno - 1, node.end_lineno or node.lineno
    column, end_column = node.col_offset, node.end_col_offset or 0
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = edit.text.encode()
    if edit.place == "instead":
        rest = lines[first][:column] + lines[end - 1][end_column:]
        if not new and not rest.strip():
            yield first, 0, (3, 0), end, 0, b""
        else:
            yield first, column, (3, 0), end - 1, end_column, new
    elif edit.place == "indent":
        for number in range(first, end):
            if lines[number].strip():
                at = len(indent) if lines[number].startswith(indent) else 0
                yield number, at, (2, 0), number, at, new
    else:
        place, order = (
            (end, (0, -column)) if edit.place == "behind" else (first, (1, 0))
        )
        block = b"".join(indent + each + newline for each in new.split(b"\n"))
        yield place, 0, order, place, 0, block


class Application(ast.NodeTransformer):
    """Changes a tree by all edits; what is new has the lines of what it replaces."""

    def __init__(self, edits: Iterable[Edit]) -> None:
        self._edits = [each for each in edits if each.text and each.why]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        nodes = [self.generic_visit(node)]
        for edit in (each for each in self._edits if each.node is node):
            [new] = ast.parse(edit.text).body
            for each in ast.walk(new):
                ast.copy_location(each, node)
            if edit.place == "instead":
                nodes = [new.value if isinstance(new, ast.Expr) else new]
                if isinstance(new, ast.For) and isinstance(node, ast.While):
                    new.body = node.body
            else:
                nodes.insert(len(nodes) if edit.place == "behind" else 0, new)
        return nodes if len(nodes) > 1 else nodes[0]


def ends_its_line(body: list[ast.stmt], number: int) -> bool:
    """Return whether a line can be added behind a statement of a body."""
    end = body[number].end_lineno or 0
    return number + 1 == len(body) or body[number + 1].lineno > end
