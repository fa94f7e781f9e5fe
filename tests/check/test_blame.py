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
from elasticrun.check.runs.moments import LineChange
from elasticrun.check.runs.routes import route_without_restart
from elasticrun.check.runs.source import find_source
from elasticrun.lint.rules.table import RULES


def test_what_is_drawn_with_a_seed_before_the_first_loop_is_no_cause(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "torch.manual_seed(0)\n"
        "net = nn.Linear(4, 3)\n"
        "shift = random.random()\n"
        "noise = torch.randn(3)\n"
    )
    source = find_source(str(script), directory=str(tmp_path), linked=[])
    finder = CauseFinder(source, [], Mask(unseeded={"random.python"}))
    run = CheckedRun(route_without_restart(1), tmp_path)

    def lines_blamed(*drawn: tuple[str, str, int]) -> list[int]:
        lines = [
            LineChange(f"random.{name}", zone, str(script), line, 1)
            for name, zone, line in drawn
        ]
        return [cause.line for cause in finder.causes(run, [], lines)]

    assert lines_blamed(("torch", "A", 1), ("torch", "A", 2)) == [0]  # Unknown.
    assert lines_blamed(("torch", "A", 2)) == [2]
    assert lines_blamed(("torch", "A", 1), ("python", "A", 3)) == [3]
    assert lines_blamed(("torch", "A", 1), ("torch", "B", 4)) == [4]
    assert lines_blamed(("torch", "P", 2), ("torch", "L", 4)) == [0]
    assert lines_blamed(("torch", "P", 2), ("python", "P", 3)) == [3]


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
