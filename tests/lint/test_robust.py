"""Nothing that Python parses makes the linter fail, and it imports little."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.lint.engine import lint_paths, lint_text
from tests.lint.pages import PAGES, PRELUDE

STDLIB = Path(sysconfig.get_paths()["stdlib"])
ROOT = Path(__file__).resolve().parents[2]
FAST = ["json", "email", "concurrent", "logging", "wsgiref"]


def problems_of(path: Path) -> list[str]:
    """Lint a file as if it were elastic; return what went wrong inside."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    result = lint_text(text + "\n# elasticrun\n", name=str(path))
    return [each.message for each in result.problems if "internal" in each.message]


@pytest.mark.parametrize("package", FAST)
def test_the_standard_library_is_no_trouble(package: str) -> None:
    for path in sorted((STDLIB / package).glob("*.py")):
        assert problems_of(path) == [], path


def standard_library() -> list[Path]:
    tests = {"site-packages", "test", "tests", "idlelib"}
    return [p for p in sorted(STDLIB.rglob("*.py")) if not tests & set(p.parts)]


@pytest.mark.slow(12)
def test_one_file_in_ten_of_the_standard_library_is_no_trouble() -> None:
    for path in standard_library()[::10]:
        assert problems_of(path) == [], path


@pytest.mark.soak
def test_the_whole_standard_library_is_no_trouble() -> None:
    for path in standard_library():
        assert problems_of(path) == [], path


@pytest.mark.soak
@pytest.mark.parametrize(
    "package", ["_pytest", "hypothesis", "mypy", "setuptools", "sympy", "torch/utils"]
)
def test_installed_packages_are_no_trouble(package: str) -> None:
    packages = Path(sysconfig.get_paths()["purelib"])
    for path in sorted((packages / package).rglob("*.py")):
        assert problems_of(path) == [], path


LINES = [line for page in PAGES.values() for line in page.wrong.splitlines()]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(LINES)), max_size=12))
def test_any_order_of_lines_is_no_trouble(lines: list[tuple[int, str]]) -> None:
    body = "".join(f"{'    ' * depth}{line.strip()}\n" for depth, line in lines)
    result = lint_text(PRELUDE + body)
    assert not [each for each in result.problems if "internal" in each.message]


@pytest.mark.parametrize(
    "text",
    [
        "import elasticrun\n" + "x = " + "(" * 80 + "1" + ")" * 80,
        # What one version of Python parses is too deep for another one.
        "import elasticrun\n" + "x = 1" + " + 1" * 900,
        "import elasticrun\n" + "x = 1" + " + 1" * 3000,
        "import elasticrun\ndef f():\n    f()\nf()\n",
        "import elasticrun\nfrom script import x\n",
        "import elasticrun\nfrom . import y\nfrom .. import z\nfrom .... import w\n",
        "import elasticrun\nclass A(A): pass\nA()\n",
        "import elasticrun\n\0",
        "import elasticrun\na = [1]\nfor b in a:\n    a.append(b)\n",
        "import elasticrun\nyield 1\nreturn 2\nbreak\n",
        """import elasticrun
from collections import namedtuple
namedtuple("Batch", "x class", rename=True)
namedtuple("Batch", ["x", name])
""",
    ],
)
def test_odd_sources_are_no_trouble(text: str) -> None:
    for problem in lint_text(text).problems:
        assert "internal" not in problem.message


def test_a_broken_rule_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: object) -> None:
        raise ZeroDivisionError("of a rule")

    monkeypatch.setattr("elasticrun.lint.engine.CHECKS", (broken,))
    (problem,) = lint_text(PRELUDE).problems
    assert "internal error: ZeroDivisionError: of a rule" in problem.message


def test_the_linter_imports_neither_torch_nor_the_rest() -> None:
    code = (
        "import sys\nfrom elasticrun.lint.command import run\n"
        "run(['examples'])\n"
        "ours = {m for m in sys.modules if m.startswith('elasticrun.')}\n"
        "assert all(m.startswith('elasticrun.lint') for m in ours), ours\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_a_process_lints_first_is_no_special_case(tmp_path: Path) -> None:
    # The first values that the walk meets are saved ones.
    script = tmp_path / "train.py"
    saved = "log = Variables(first=first, second=second)\n"
    text = "first, second = {}, {}\n" + PRELUDE + saved + PAGES["ER301"].wrong
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "elasticrun", "lint", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ER301 `best`" in result.stdout


LOADER = "import torch\nfrom elasticrun import *\ntrain = AdaptiveDataLoader(d)\n"
EPOCH = "for epoch in remaining_epochs_until(3):\n"
PLAIN = """\
for epoch in range(3):
    for x in train:
        loss = model(x)
        loss.backward()
        optimizer.step()
"""
PLAIN_HEAD = """\
import torch
from torch.utils.data import DataLoader
train = DataLoader(d)
optimizer = torch.optim.SGD(model.parameters(), lr=1)
"""


def nested(form: str, number: int) -> str:
    return "".join(form.format(i, n=i + 1) for i in range(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOADER + EPOCH + nested("    for x in train: s{0} = x\n", 2000), "steps"),
        (LOADER + (EPOCH + "    for x in train: f(x)\n") * 800, "steps"),
        (PLAIN_HEAD + PLAIN * 800, "steps"),
        (LOADER + "a0 = train\n" + nested("a{n} = zip(a{0}, a{0})\n", 30), ""),
        (
            "class C0: pass\n" + nested("class C{n}(C{0}, C{0}): pass\n", 30) + LOADER,
            "",
        ),
        (LOADER + "import " + "a." * 100_000 + "b\n", "a thousand parts"),
        (LOADER + "import " + ", ".join(f"n{i}" for i in range(50_000)), "steps"),
    ],
    ids=["loops", "epochs", "plain", "zips", "bases", "name", "imports"],
)
def test_a_source_without_end_is_given_up(text: str, said: str) -> None:
    tail = "\nfor x in a30: f(x)\n" if "zip" in text else "\nC30().x = 1\n"
    end = tail if "30" in text else ""
    messages = [each.message for each in lint_text(text + end).problems]
    assert bool(messages) == bool(said)
    assert said in "".join(messages)


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    script, large = tmp_path / "train.py", tmp_path / "large.py"
    script.write_text(LOADER + "import pipe, large\n" + EPOCH + "    pass\n")
    large.write_text("x = 1\n" * 200_000)
    assert lint_paths([script]).problems == []
    problems = lint_paths([tmp_path / "pipe.py", large]).problems
    assert "no file or folder" in problems[0].message
    assert "more than 1 MB" in problems[1].message
