"""What README and docs refer to exists: files, headings, tests, names, variables."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import elasticrun
from elasticrun.saving.settings import Settings
from tests.docs.documents import DOCUMENTS, ROOT, anchors, links, mentioned_tests

GUARANTEES = ROOT / "docs" / "guarantees.md"
API = ROOT / "docs" / "api.md"
IDS = [str(document.relative_to(ROOT)) for document in DOCUMENTS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_relative_links_lead_somewhere(document: Path) -> None:
    broken = [link for link in links(document) if not leads_somewhere(link, document)]
    assert not broken


def leads_somewhere(link: str, document: Path) -> bool:
    if re.match(r"https?://", link):
        return True
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(target)


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_mentioned_tests_exist(document: Path) -> None:
    missing = [
        f"{file}::{name}"
        for file, name in mentioned_tests(document)
        if not (ROOT / file).is_file() or (name and name not in functions(ROOT / file))
    ]
    assert not missing


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_a_test() -> None:
    text = GUARANTEES.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(P\d) .*$", text, re.MULTILINE)
    assert rows == [f"P{number}" for number in range(1, 10)]
    for line in text.splitlines():
        if re.match(r"\| \*\*P\d ", line):
            assert re.search(r"tests/[\w/]+\.py::\w+", line), line


def test_every_public_name_is_in_the_reference() -> None:
    text = API.read_text(encoding="utf-8")
    missing = [name for name in elasticrun.__all__ if f"`{name}" not in text]
    assert not missing


def test_every_parameter_is_listed() -> None:
    text = API.read_text(encoding="utf-8")
    for name, listed in re.findall(r"`(\w+)\(([^`]*)\)`", text):
        if name in elasticrun.__all__ and "..." not in listed:
            made = getattr(elasticrun, name)
            made = made.__init__ if name == "State" else made
            real = [
                each for each in inspect.signature(made).parameters if each != "self"
            ]
            values = re.sub(r"=\([^)]*\)", "", listed)
            assert re.findall(r"(?:^|, )\**(\w+)", values) == real, name


def test_every_variable_is_documented_and_read() -> None:
    read = {each.metadata["variable"] for each in fields(Settings)} - {""}
    usage = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    assert set(re.findall(r"ELASTICRUN_[A-Z_]+\b", usage)) == read
    launcher = (ROOT / "elasticrun/launcher/environment.py").read_text(encoding="utf-8")
    known = read | set(re.findall(r'"(ELASTICRUN_[A-Z_]+)"', launcher))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"ELASTICRUN_[A-Z_]+\b", text)) <= known


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`| {4})make (\w+)", text, re.MULTILINE)) <= targets


def test_ci_calls_the_readmes_tests_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [
        line for line in lines if line and not line.startswith(("#", "set", "cd"))
    ]
    assert commands == ["make test", "make wide"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in readme for command in commands)
