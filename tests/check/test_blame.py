"""From a difference to its cause."""

from __future__ import annotations

import ast
import inspect
import re

from elasticrun.check import blame
from elasticrun.lint.rules.table import RULES


def test_each_rule_that_a_cause_may_have_is_one_of_the_linter() -> None:
    codes = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(blame)))
        if isinstance(node, ast.Constant)
        if isinstance(node.value, str) and re.fullmatch(r"ER\d+", node.value)
    }
    assert len(codes) > 6
    for code in codes:  # The beginning of some, or one.
        assert any(each.startswith(code) for each in RULES), code
