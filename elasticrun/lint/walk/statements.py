"""Statements: where they lead, what holds in branches, and what surrounds them."""

from __future__ import annotations

import ast
import functools
import re
import sys

from elasticrun.lint import naming
from elasticrun.lint.graph import LOG, NONE, OWN, TEST, Guard, Sink, Step, flow_to
from elasticrun.lint.naming import last_name, named, written
from elasticrun.lint.values import Value, join, merged, unknown
from elasticrun.lint.walk.walk import RunStatement, Walk

_QUIET_TEST = Sink("quiet_test")  # decides only about a line in a log
_EXITS = frozenset(("sys.exit", "exit", "quit", "os._exit"))


# Simple statements.


def _run_expr(walk: Walk, node: ast.Expr) -> None:
    if isinstance(node.value, ast.Constant):
        return
    walk.step(node)
    with walk.into(NONE):
        walk.evaluate(node.value)
    if isinstance(node.value, ast.Call) and written(node.value.func) in _EXITS:
        walk.here = []


def _run_return(walk: Walk, node: ast.Return) -> None:
    frame = walk.frame
    walk.step(node)
    with walk.into(flow_to((frame.uid, "return"))):
        value = walk.evaluate(node.value)
    before = frame.returned
    frame.returned = value if before is None else join(before, value)
    frame.exits += walk.here
    walk.here = []


def _run_raise(walk: Walk, node: ast.Raise | ast.Assert) -> None:
    walk.step(node)
    with walk.into(LOG):
        walk.evaluate(node.exc if isinstance(node, ast.Raise) else node.test)
    if isinstance(node, ast.Raise):
        walk.here = []


def _run_leaving(walk: Walk, node: ast.Break | ast.Continue) -> None:
    step = walk.step(node)
    for leaving in walk.frame.loops[-1:]:
        if isinstance(node, ast.Continue):
            leaving.continues.append(step)
        else:
            leaving.breaks.append(step)
            walk.note(node, "left", loop=leaving.of, plain_loops=walk.plain_loops)
    walk.here = []


# Branches.


def _run_if(walk: Walk, node: ast.If) -> None:
    frame = walk.frame
    walk.step(node)
    if written(node.test) == "__name__ == '__main__'":
        if frame.module is walk.root:
            walk.run(node.body)
        return
    with walk.into(_sink_of_test(walk, node)):
        test = walk.evaluate(node.test)
    guard = walk.guard(node.test, test.taints)
    first, second = _run_branches(
        walk, [(guard, node.body), (guard.opposite, node.orelse)]
    )
    if first != second:
        # One branch leaves: what follows runs under the other one's condition.
        walk.guards += (guard if first else guard.opposite,)


def _run_branches(
    walk: Walk, branches: list[tuple[Guard, list[ast.stmt]]]
) -> list[bool]:
    """Walk through branches and go on behind them; return which of them end there."""
    frame, start, before = walk.frame, walk.here, walk.frame.env
    ends = []
    for guard, body in branches:
        walk.here, frame.env = start, dict(before)
        with walk.guarded(guard):
            walk.run(body)
        ends.append((walk.here, frame.env))
    _meet(walk, ends)
    return [bool(here) for here, _ in ends]


def _meet(walk: Walk, ends: list[tuple[list[Step], dict[str, Value]]]) -> None:
    """Go on behind branches, with what the names may be where each ends."""
    reached = [each for each in ends if each[0]] or ends[-1:]
    walk.here = list(dict.fromkeys(step for here, _ in reached for step in here))
    walk.frame.env = functools.reduce(merged, (env for _, env in reached))


def _run_match(walk: Walk, node: ast.Match) -> None:
    walk.step(node)
    with walk.into(TEST):
        subject = walk.evaluate(node.subject)
    guard = walk.guard(node.subject, subject.taints)
    branches = [(guard, case.body) for case in node.cases]
    _run_branches(walk, [*branches, (guard.opposite, [])])


def _sink_of_test(walk: Walk, node: ast.If) -> Sink:
    """Return what a test is to what it reads: a decision, or only about a log line."""
    if _is_lazy(node):
        return OWN
    if not (_is_quiet(node.body) and _is_quiet(node.orelse)):
        return TEST
    # What is set in both branches gets its value by the test.
    places = tuple(
        (walk.frame.binder(name).uid, name)
        for name in _set_in(node.body) & _set_in(node.orelse)
    )
    return Sink("flow", places) if places else _QUIET_TEST


def _set_in(body: list[ast.stmt]) -> set[str]:
    """Return the names that a body sets."""
    nodes = (node for statement in body for node in ast.walk(statement))
    names = (each for each in nodes if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}


# `with` and `try`.


def _run_with(walk: Walk, node: ast.With | ast.AsyncWith) -> None:
    walk.step(node)
    for item in node.items:
        value = walk.evaluate(item.context_expr)
        if item.optional_vars is not None:
            walk.assign(item.optional_vars, value)
    walk.run(node.body)


def _run_try(walk: Walk, node: ast.Try) -> None:
    entry = walk.step(node)
    first, before = len(walk.graph.steps), dict(walk.frame.env)
    walk.run(node.body)
    raising = walk.graph.steps[first:]
    walk.run(node.orelse)
    _run_handlers(walk, node, [entry, *raising], before)
    if node.finalbody and not walk.here:
        walk.here = [entry]
    walk.run(node.finalbody)


def _run_handlers(
    walk: Walk, node: ast.Try, starts: list[Step], before: dict[str, Value]
) -> None:
    """Walk through the handlers, each behind all steps that may raise."""
    frame, env = walk.frame, walk.frame.env
    ends = [(walk.here, env)]
    for handler in node.handlers:
        walk.here, frame.env = starts, merged(dict(env), before)
        walk.step(handler)
        walk.evaluate(handler.type)
        if handler.name:
            frame.env[handler.name] = unknown()
        walk.run(handler.body)
        ends.append((walk.here, frame.env))
    _meet(walk, ends)


# Which branches only log, and which tests only ask whether something is made yet.


_TRACKING = naming.TRACKER_METHODS - {"log"}
_QUIET = (naming.LOG_METHODS - _TRACKING) | named(
    "echo pprint request_checkpoint flush format item update refresh empty_cache "
    "synchronize collect write time clear"
)
_SHOWING = named(
    "display show print report summary summarize progress log echo say status"
)


def _is_quiet(body: list[ast.stmt]) -> bool:
    """Return whether statements only log, or set what later log lines need."""
    return all(_is_quiet_statement(each) for each in body)


def _is_quiet_statement(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Call) or _is_quiet_call(node.value)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(each, ast.Name | ast.Tuple) for each in targets)
    if isinstance(node, ast.If):
        return _is_quiet(node.body) and _is_quiet(node.orelse)
    if isinstance(node, ast.For | ast.With):
        return _is_quiet(node.body)
    return isinstance(node, ast.Pass)


def _is_quiet_call(node: ast.Call) -> bool:
    name = last_name(node.func)
    words = name.lower().strip("_").split("_")
    return name in _QUIET or not _SHOWING.isdisjoint(words)


def _is_lazy(node: ast.If) -> bool:
    """Return whether an `if` only makes what its test finds to be missing."""
    test = re.match(r"not (.+)$|(.+) is None$|.+ not in (.+)$", written(node.test))
    if test is None or node.orelse:
        return False
    missing = test[test.lastindex or 0]
    made = [
        written(target)
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
    ]
    return any(each == missing or each.startswith(f"{missing}[") for each in made)


STATEMENTS: dict[type[ast.stmt], RunStatement] = {
    ast.Expr: _run_expr,
    ast.Return: _run_return,
    ast.Raise: _run_raise,
    ast.Assert: _run_raise,
    ast.Break: _run_leaving,
    ast.Continue: _run_leaving,
    ast.Global: lambda walk, node: walk.frame.globals.update(node.names),
    ast.Nonlocal: lambda walk, node: walk.frame.nonlocals.update(node.names),
    ast.If: _run_if,
    ast.Match: _run_match,
    ast.With: _run_with,
    ast.AsyncWith: _run_with,
    ast.Try: _run_try,
}
if sys.version_info >= (3, 11):
    STATEMENTS[ast.TryStar] = _run_try
