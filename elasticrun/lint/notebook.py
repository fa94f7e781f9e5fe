"""Jupyter notebooks as modules: their code cells in a row, and which line is whose."""

from __future__ import annotations

import ast
import bisect
import json
import re
import warnings
from typing import Any

# IPython's own syntax. What a line assigns is kept as a name.
_MAGIC = re.compile(
    r"^(\s*)((?:[\w, ]+=\s*)?)(?:%{1,2}[A-Za-z]|!|\?).*|^(\s*)\S+\?{1,2}$"
)
_LINE = re.compile(r"\bline (\d+)\b")
_LINK = re.compile(r"(?<= )(\d+)(?= ->|;|$)")
_AROUND_CODE = re.compile(r"%%(?:time|timeit|capture|prun)\b")


class Cells:
    """Where the cells of a notebook begin in the text of its module.

    Each is headed by a line with its number, which counts all cells from 1.
    """

    def __init__(self) -> None:
        self._heads: list[int] = []
        self._numbers: list[int] = []

    def add(self, number: int, line: int) -> None:
        self._heads.append(line)
        self._numbers.append(number)

    def place(self, line: int) -> tuple[int, int]:
        """Return the number of the cell in which a line stands, and its line there."""
        which = max(bisect.bisect(self._heads, line) - 1, 0)
        return self._numbers[which], max(line - self._heads[which], 1)

    def in_words(self, message: str) -> str:
        """Return a message, in which "line 14" is a line of the module, for people."""
        return _LINE.sub(
            lambda found: "line {1} of cell {0}".format(*self._of(found)), message
        )

    def in_chain(self, chain: str) -> str:
        """Return a chain of calls, whose links end with such lines, for people."""
        return _LINK.sub(lambda found: "cell {}:{}".format(*self._of(found)), chain)

    def _of(self, found: re.Match[str]) -> tuple[int, int]:
        return self.place(int(found[1]))


def read_notebook(text: str) -> tuple[str, Cells]:
    """Return the Python code of a notebook, and where its cells are in it.

    Raises:
        ValueError: It is no notebook.
    """
    notebook: Any = json.loads(text)
    try:
        language = notebook["metadata"].get("language_info", {}).get("name", "python")
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(notebook["cells"], 1)
            if cell["cell_type"] == "code" and language == "python"
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it has no cells as a notebook has: {error!r}") from error
    cells, lines = Cells(), []
    for number, source in sources:
        lines.append(f"# cell {number}")
        cells.add(number, len(lines))
        lines += _as_python(source).split("\n")
    return "\n".join(lines) + "\n", cells


def _as_python(source: str) -> str:
    """Return a cell without IPython's own syntax, with as many lines."""
    if source.startswith("%%"):
        first, *rest = source.split("\n")
        kept = rest if _AROUND_CODE.match(first) else [""] * len(rest)
        return "\n".join(["", *kept])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError):
        return "\n".join(map(_without_magic, source.split("\n")))
    return source


def _without_magic(line: str) -> str:
    match = _MAGIC.match(line)
    if match is None:
        return line
    indent, target = match[1] or match[3] or "", match[2]
    return f"{indent}{target}None" if target else f"{indent}pass"
