"""Who looks at a variable is noticed before it has the value."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from elasticrun.launcher import environment

LOOKS: dict[str, Callable[[], object]] = {
    "item": lambda: os.environ["RANK"],
    "get": lambda: os.environ.get("RANK"),
    "getenv": lambda: os.getenv("RANK"),
    "in": lambda: "RANK" in os.environ,
    "setdefault": lambda: os.environ.setdefault("RANK", "5"),
    "set": lambda: os.environ.update(RANK="5"),
    "pop": lambda: os.environ.pop("RANK"),
    "after another one": lambda: (os.environ["HOME"], os.environ["RANK"]),
    "after those before": lambda: (
        os.environ["OTHER"],
        os.environ["ANOTHER"],
        os.environ["RANK"],
    ),
}
COPIES: dict[str, Callable[[], object]] = {
    "copy": os.environ.copy,
    "dict": lambda: dict(os.environ),
    "display": lambda: {**os.environ},
    "items": lambda: list(os.environ.items()),
    "process": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "other": lambda: os.environ["HOME"],
}


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("OTHER", "1")
    monkeypatch.setenv("ANOTHER", "2")
    monkeypatch.setenv("RANK", "3")


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_who_looks_is_noticed_before(look: Callable[[], object]) -> None:
    called: list[str] = []

    def call(name: str) -> None:
        called.append(name)
        noticing.close()
        os.environ["RANK"] = "7"

    noticing = ExitStack()
    noticing.enter_context(environment.noticing_reads({"RANK"}, call))
    found = look()
    assert called == ["RANK"]
    if found is not None and found is not True:
        assert "7" in str(found)


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_who_copies_all_is_not(copy: Callable[[], object]) -> None:
    called: list[str] = []
    with environment.noticing_reads({"RANK"}, called.append):
        copy()
    assert called == []
