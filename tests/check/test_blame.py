"""From a difference to its cause."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from elasticrun.check import blame
from elasticrun.check.blame import CauseFinder
from elasticrun.check.comparing import Mask
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.moments import CLOCK, LineChange
from elasticrun.check.runs.routes import route_without_restart
from elasticrun.check.runs.source import find_source
from elasticrun.lint.rules.table import RULES


def test_a_look_at_the_clock_is_a_cause_where_there_is_no_better_one(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("if time.monotonic() > end:\n    stop()\n")
    source = find_source(str(script), directory=str(tmp_path), linked=[])
    finder = CauseFinder(source, [], Mask())
    run = CheckedRun(route_without_restart(1), tmp_path)
    looks = [LineChange(CLOCK, zone, str(script), 1, 0) for zone in "PL"]
    (cause,) = finder.causes(run, [], looks)
    assert (cause.how, cause.line, cause.source) == (
        "timed", 1, "if time.monotonic() > end:",
    )  # fmt: skip


def test_each_rule_that_a_cause_may_have_is_one_of_the_linter() -> None:
    codes = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(blame)))
        if isinstance(node, ast.Constant)
        if isinstance(node.value, str) and re.fullmatch(r"ER\d+", node.value)
    }
    assert len(codes) > 9
    for code in codes:  # The beginning of some, or one.
        assert any(each.startswith(code) for each in RULES), code
