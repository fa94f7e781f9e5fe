"""What README and docs refer to exists: files, headings, tests, names, variables."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import elasticrun
from elasticrun.check.report import ExitCode
from elasticrun.errors import BY_SIGNAL, FAILED, NO_JOB, REFUSED, STOPPED, USAGE
from elasticrun.saving.settings import Settings
from tests.docs.documents import (
    DOCUMENTS,
    ROOT,
    anchors,
    links,
    mentioned_tests,
    sentences,
)

sys.path.insert(0, str(ROOT / "docs"))
from command_line import complete

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "elasticrun").rglob("*.py")
}
GUARANTEES = ROOT / "docs" / "explanation" / "guarantees.md"
REFERENCE = ROOT / "docs" / "reference"
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


def rows(page: str) -> list[list[str]]:
    """Return the cells of all tables on a page of the reference."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_every_public_name_is_in_the_reference() -> None:
    listed = [cells[0].strip("`") for cells in rows("api.md")]
    assert sorted(name for name in listed if name in elasticrun.__all__) == sorted(
        elasticrun.__all__
    )


def test_the_command_line_has_the_arguments_of_the_parsers() -> None:
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    assert complete(page) == page, "write it anew: python docs/command_line.py"


def test_settings_have_the_arguments_and_defaults_of_the_code() -> None:
    listed = {
        (cells[0].strip("`"), cells[1].strip("`"))
        for cells in rows("settings.md")
        if cells[2] not in ("meaning", "---")
    }
    arguments = inspect.signature(elasticrun.init).parameters
    assert listed == {
        (each.metadata["variable"], each.name if each.name in arguments else "")
        for each in fields(Settings)
    }
    said = {cells[0].strip("`"): cells[3] for cells in rows("settings.md")}
    for variable in ("KEEP", "GRACE", "SAVE_INTERVAL"):
        default = getattr(Settings(), variable.lower())
        assert float(said[f"ELASTICRUN_{variable}"]) == default


def test_exit_codes_are_those_of_the_code() -> None:
    said = {cells[0]: cells[1] for cells in rows("exit-codes.md")}
    assert {"1", "2", "3", "4", "75"} <= said.keys()
    assert (FAILED, USAGE, NO_JOB, REFUSED, STOPPED) == (1, 2, 3, 4, 75)
    (codes,) = (code for code in said if code.startswith("130"))
    names = re.findall(r"SIG\w+", said[codes])
    assert [BY_SIGNAL[signal.Signals[name]] for name in names] == [
        int(code) for code in codes.split(",")
    ]
    codes_of_check = {cells[0] for cells in rows("check.md") if cells[0].isdigit()}
    assert codes_of_check == {str(int(code)) for code in ExitCode}


def test_messages_are_in_the_source() -> None:
    code = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for path in (ROOT / "elasticrun").rglob("*.py")
    )
    missing = [
        cells[0]
        for cells in rows("messages.md")
        if cells[0].startswith("`")
        and not re.search(
            r"[^\n]{0,90}?".join(map(re.escape, cells[0].strip("`").split("..."))), code
        )
    ]
    assert not missing


def test_the_glossary_has_the_words_of_the_project() -> None:
    known = {word for cells in rows("glossary.md") for word in cells[0].split(", ")}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    words = contributing.split("## Words")[1].split("## A change")[0]
    terms = re.findall(r"^\| ([^|]+?) \|", words, re.MULTILINE)[2:]
    assert {word for term in terms for word in term.split(", ")} - known == {
        *("global", "local")  # There batches stand in one row.
    }


def test_every_variable_is_documented_and_read() -> None:
    read = {each.metadata["variable"] for each in fields(Settings)} - {""}
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    assert set(re.findall(r"ELASTICRUN_[A-Z_]+\b", page)) == read
    launcher = (ROOT / "elasticrun/launcher/environment.py").read_text(encoding="utf-8")
    known = read | set(re.findall(r'"(ELASTICRUN_[A-Z_]+)"', launcher))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"ELASTICRUN_[A-Z_]+\b", text)) <= known


def test_sentences_for_users_are_short() -> None:
    for_developers = {ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    for_developers |= {ROOT / "docs" / name for name in ("design.md", "changes.md")}
    long = [
        f"{document.relative_to(ROOT)}: {sentence}"
        for document in DOCUMENTS
        if document not in for_developers
        for sentence in sentences(document.read_text(encoding="utf-8"))
        if len(sentence.split()) > 30
    ]
    assert not long


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`| {4})make (\w+)", text, re.MULTILINE)) <= targets


def test_ci_calls_the_tests_of_contributing_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [
        line for line in lines if line and not line.startswith(("#", "set", "cd"))
    ]
    assert commands == ["make test", "make wide"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(command in text for command in commands)


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_what_scripts_import_of_the_package_is_there(folder: str) -> None:
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and name.startswith("elasticrun"):
                try:
                    module = importlib.import_module(name)
                except ImportError as error:
                    if str(error.name).startswith("elasticrun"):
                        missing.append((path.name, name))
                    continue  # A library that is not installed here.
                missing += [
                    (path.name, each.name)
                    for each in node.names
                    if not hasattr(module, each.name)
                    and f"{name}.{each.name}" not in MODULES
                ]
    assert missing == []
