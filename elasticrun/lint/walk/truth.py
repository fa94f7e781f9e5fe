"""Tests whose outcome is known wherever they are reached."""

from __future__ import annotations

import ast

from elasticrun.lint.values import Value
from elasticrun.lint.walk.frames import Frame


def truth(test: ast.expr, frame: Frame) -> bool | None:
    """Return whether a test holds whenever it is reached here, or None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand, frame)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return _truth_of_all(test, frame)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _truth_of_comparison(test, frame)
    if isinstance(test, ast.Constant) and not isinstance(test.value, bool | int):
        return None
    value = frame.fixed_value(test)
    if value is None:
        return None
    if value.kind == "const":
        return bool(value.constant)
    return True if value.is_object and value.kind not in ("list", "dict") else None


def _truth_of_all(test: ast.BoolOp, frame: Frame) -> bool | None:
    truths = [truth(each, frame) for each in test.values]
    decisive = isinstance(test.op, ast.Or)
    if decisive in truths:
        return decisive
    return None if None in truths else not decisive


def _truth_of_comparison(test: ast.Compare, frame: Frame) -> bool | None:
    left = frame.fixed_value(test.left)
    right = frame.fixed_value(test.comparators[0])
    operator = test.ops[0]
    if left is None:
        return None
    if right is None:
        return _truth_of_membership(left, operator, test.comparators[0])
    is_none = right.kind == "const" and right.constant is None
    if is_none and left.is_object:
        return isinstance(operator, ast.IsNot | ast.NotEq)
    if left.kind != "const" or right.kind != "const":
        return None
    if not isinstance(operator, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
        return None
    is_same = bool(left.constant == right.constant)
    return is_same is isinstance(operator, ast.Eq | ast.Is)


def _truth_of_membership(
    left: Value, operator: ast.cmpop, container: ast.expr
) -> bool | None:
    if left.kind != "const" or not isinstance(
        container, ast.Tuple | ast.List | ast.Set
    ):
        return None
    values = [each.value for each in container.elts if isinstance(each, ast.Constant)]
    is_known = len(values) == len(container.elts)
    if not is_known or not isinstance(operator, ast.In | ast.NotIn):
        return None
    return (left.constant in values) is isinstance(operator, ast.In)
