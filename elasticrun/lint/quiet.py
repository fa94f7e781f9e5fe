"""Which branches only log, and which tests only ask whether something is made yet."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.naming import last_name, named, written

_ALSO_QUIET = named(
    "request_checkpoint flush format item update refresh empty_cache synchronize "
    "collect write time"
)
_SHOWING = named(
    "display show print report summary summarize progress log echo say status"
)


def is_quiet(body: list[ast.stmt]) -> bool:
    """Return whether statements only log, or set what later log lines need."""
    return all(_is_quiet_statement(each) for each in body)


def _is_quiet_statement(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Call) or _is_quiet_call(node.value)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(each, ast.Name | ast.Tuple) for each in targets)
    if isinstance(node, ast.If):
        return is_quiet(node.body) and is_quiet(node.orelse)
    if isinstance(node, ast.For | ast.With):
        return is_quiet(node.body)
    return isinstance(node, ast.Pass)


def _is_quiet_call(node: ast.Call) -> bool:
    name = last_name(node.func)
    tracks = name in catalog.TRACKER_METHODS - {"log"} and bool(name)
    is_logging = name in catalog.LOG_METHODS or name in ("print", "echo", "pprint")
    words = name.lower().strip("_").split("_")
    is_named_so = bool(_SHOWING & set(words))
    return (is_logging and not tracks) or is_named_so or name in _ALSO_QUIET


def is_lazy(node: ast.If) -> bool:
    """Return whether an `if` only makes what its test finds to be missing."""
    wanted = _missing(node.test)
    if wanted is None or node.orelse:
        return False
    stored = [
        written(target)
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
    ]
    return any(each == wanted or each.startswith(f"{wanted}[") for each in stored)


def _missing(test: ast.expr) -> str | None:
    """Return what a test like `x is None`, `not x` or `k not in x` finds missing."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return written(test.operand)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    right = test.comparators[0]
    if isinstance(test.ops[0], ast.Is) and isinstance(right, ast.Constant):
        return written(test.left) if right.value is None else None
    return written(right) if isinstance(test.ops[0], ast.NotIn) else None
