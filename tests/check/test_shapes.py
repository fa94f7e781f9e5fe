"""Restarts inside loops of every shape: what is kept passes, what is lost is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.checking import check

pytestmark = [pytest.mark.slow, pytest.mark.wide]

SHAPES = ("batches", "turns", "nested", "asked", "listed", "growing", "combined")
# One run that is restarted after the first batch, or step, of each of them.
INSIDE_EACH = [
    option for number in range(len(SHAPES)) for option in ("--at", f"0:{number}:1")
]


def test_what_is_kept_in_each_shape_passes(tmp_path: Path) -> None:
    found = check(tmp_path, "shapes.py", *INSIDE_EACH)
    assert found.code == 0, found.report
    assert "boundaries: 23" in found.report.stages[0]


def test_what_is_lost_in_each_shape_is_found(tmp_path: Path) -> None:
    found = check(tmp_path, "shapes.py", *INSIDE_EACH, "--", "plain")
    assert found.code == 1, found.report
    (result,) = found.report.results
    causes = {(each.how, each.name) for each in result.causes}
    assert causes >= {("lost", f"{shape}.total.value") for shape in SHAPES}
