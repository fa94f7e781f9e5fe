"""The documents, and what stands in them: code blocks, links, names of tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(
    r"^```(?P<info>[^`\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
_TEST = re.compile(r"(?P<file>tests/[\w/]+\.py)(?:::(?P<name>\w+))?")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        line: The number of its first line of code.
        info: What stands behind the fence: the language, then options.
    """

    document: Path
    line: int
    info: tuple[str, ...]
    code: str

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """At how many replicas it runs: 1 and 3, but for the option `replicas=N`.

        One that starts replicas itself runs at 1, one that needs a process group at 3.
        """
        options = dict(option.split("=") for option in self.info[1:])
        return (int(options["replicas"]),) if options else (1, 3)


def blocks(*languages: str) -> list[Block]:
    """Return the code blocks of all documents, in some languages if any is given."""
    return [
        block
        for document in DOCUMENTS
        for block in blocks_of(document)
        if not languages or block.language in languages
    ]


def blocks_of(document: Path) -> list[Block]:
    """Return the code blocks of one document."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(
            document,
            text.count("\n", 0, match.start("code")) + 1,
            tuple(match["info"].split()),
            match["code"],
        )
        for match in _FENCE.finditer(text)
    ]


def prose(document: Path) -> str:
    """Return a document without its code blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> list[str]:
    """Return the targets of the links in a document."""
    return [match["target"] for match in _LINK.finditer(prose(document))]


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    titles = [match["title"] for match in _HEADING.finditer(prose(document))]
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def mentioned_tests(document: Path) -> list[tuple[str, str | None]]:
    """Return the files of tests that a document names, with the function if it does."""
    text = document.read_text(encoding="utf-8")
    return [(match["file"], match["name"]) for match in _TEST.finditer(text)]


def side_of(diff: str, side: str) -> str:
    """Return one side of a diff, "-" or "+"."""
    lines = diff.splitlines()
    assert all(line[:1] in ("-", "+", " ", "") for line in lines)
    return "\n".join(line[1:] for line in lines if line[:1] in (side, " ", ""))


def sentences(text: str) -> list[str]:
    """Return the sentences of Markdown: of paragraphs, points of lists, cells."""
    text = re.sub(r"^(?: {4}.*\n)+", "\n", _FENCE.sub("\n\n", text), flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]+\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^(#+ .*|[-*] |\d+\. )", r"\n\n\1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\\)\|", "\n\n", text)
    blocks = (re.sub(r"\s+", " ", block) for block in re.split(r"\n\s*\n", text))
    return [
        sentence.strip()
        for block in blocks
        for sentence in re.split(r"(?<=[.?!])\s+(?=[\"A-Za-z(*])", block)
        if re.search(r"\w", sentence)
    ]
