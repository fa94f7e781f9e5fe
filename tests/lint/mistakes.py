"""Mistakes to plant in scripts: what to change, and the rule that finds it.

They stand in files `mistakes.diff`, separated by empty lines. A line `# SCRIPT CODE`
begins a mistake, which is found by a rule, or one of several as in `ER301|ER302`. Each
block behind it is a change of some text: lines with `-` are there, those with `+` come
in their place, and those with a space stay. The last line may be the beginning of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    """A script, the codes of which one must be found, and pairs of texts."""

    script: str
    codes: frozenset[str]
    edits: tuple[tuple[str, str], ...]

    def plant(self, text: str) -> str:
        """Return the script with the mistake in it."""
        for old, new in self.edits:
            assert old in text, old
            text = text.replace(old, new, 1)
        return text


def read_mistakes(path: Path) -> dict[str, Mistake]:
    """Return the mistakes in a file, by a name for each."""
    found: dict[str, Mistake] = {}
    for entry in path.read_text(encoding="utf-8").removeprefix("# ").split("\n\n# "):
        head, _, changes = entry.rstrip("\n").partition("\n")
        script, codes = head.split()
        edits = tuple(map(_edit, changes.split("\n\n")))
        name = f"{script}-{codes}-{len(found)}"
        found[name] = Mistake(script, frozenset(codes.split("|")), edits)
    return found


def _edit(block: str) -> tuple[str, str]:
    lines = block.split("\n")
    old, new = (
        "\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+"
    )
    return (old, new) if new else (old + "\n", "")
