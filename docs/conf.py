"""How Sphinx builds the site: from the Markdown that GitHub shows, and the docstrings.

The pages stay plain Markdown. The menu is made of the headings and links of index.md,
and the reference of the names that stand in the table of reference/api.md.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from textwrap import shorten
from typing import Any

from docutils import nodes

import elasticrun

project = "elasticrun"
release = elasticrun.__version__
copyright = "the authors of elasticrun, Apache-2.0"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The source directory is the repository: links between its folders work in both places.
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "elasticrun/lint/pages/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]

myst_heading_anchors = 4  # as GitHub makes them
myst_number_code_blocks: list[str] = []
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
default_role = "code"  # docstrings have `names` in single backticks
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "inherited-members": "DataLoader,Dataset,Module,MutableMapping,_TextIOBase",
}
autodoc_preserve_defaults = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "elasticrun"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"

API = Path(__file__).with_name("reference") / "api.md"
# The members of classes that programs use; loaders and streams ask more of each other.
MEMBERS = set(re.findall(r"`(\w+)(?:\(\w*\))?`", API.read_text(encoding="utf-8")))
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def add_menu(_app: Any, page: str, source: list[str]) -> None:
    """Give the first page what Sphinx makes its menu of, from its own links."""
    if page.startswith("elasticrun/lint/pages/ER"):  # Pieces of scripts, in colours.
        source[0] = source[0].replace("```text", "```python")
    if page == "elasticrun/lint/pages/index":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nER*\n```\n"
    if page != root_doc:
        return
    _, *parts = re.split(r"^## (.+)$", source[0], flags=re.MULTILINE)
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        links = re.findall(r"\]\(([^)#:]+\.md)\)", text)
        pages = "\n".join(dict.fromkeys(link.removesuffix(".md") for link in links))
        options = f":hidden:\n:caption: {title}\n:maxdepth: 1"
        source[0] += f"\n```{{toctree}}\n{options}\n\n{pages}\n```\n"


def add_docstrings(_app: Any, page: str, source: list[str]) -> None:
    """Put the docstrings of the names in a section's table below that section."""
    if page != "docs/reference/api":
        return
    head, *sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE)
    source[0] = head + "".join(section + docstrings(section) for section in sections)


def describe(_app: Any, _page: str, _template: str, context: Any, tree: Any) -> None:
    """Give a page its first paragraph as the description that searches show."""
    if tree is None:
        return
    of_text = [
        p for p in tree.findall(nodes.paragraph) if p.parent.tagname == "section"
    ]
    texts = [" ".join(each.astext().split()) for each in of_text]
    texts.append(f"elasticrun: {context['title']}")
    text = next(each for each in texts if not each.startswith("Severity:"))
    described = html.escape(shorten(text, 160, placeholder=" ..."))
    context["metatags"] += f'<meta name="description" content="{described}">'


def docstrings(section: str) -> str:
    """Return the directives that show the docstrings of a section's names."""
    names = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    lines = "\n".join(
        f".. auto{'class' if name[0].isupper() else 'function'}:: elasticrun.{name}"
        for name in names
        if name in elasticrun.__all__
    )
    return f"\n```{{eval-rst}}\n{lines}\n```\n\n" if lines else ""


def mark_code(
    _app: Any, _kind: str, _name: str, _of: Any, _options: Any, lines: list[str]
) -> None:
    """Tell Sphinx which parts of a docstring are code: those that are indented.

    It comes before napoleon, whose sections are indented too and begin with a title.
    """
    for number, line in enumerate(lines):
        if line.startswith("Replay:"):  # A paragraph, as "Collective:" before it is.
            lines[number] = f"\n{line}"
    before = ""
    for number, line in enumerate(lines):
        begins = line.startswith("    ") and not lines[number - 1].strip()
        if begins and before[:1] not in ("", " ") and not _SECTION.match(before):
            lines[number - 1] = "\n::\n"
        before = line if line.strip() else before
    lines[:] = "\n".join(lines).split("\n")


def skip(
    _app: Any, _kind: str, name: str, _of: Any, is_skipped: bool, _options: Any
) -> bool:
    """Return whether a member of a class is left out."""
    return is_skipped or name not in MEMBERS


def setup(app: Any) -> None:
    """Let pages and docstrings be completed before they are read."""
    app.connect("source-read", add_menu)
    app.connect("source-read", add_docstrings)
    app.connect("html-page-context", describe)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", mark_code, priority=1)
