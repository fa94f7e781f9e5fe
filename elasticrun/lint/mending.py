"""How findings are mended: a moved statement, or an edited argument."""

from __future__ import annotations

import ast

from elasticrun.lint.finding import Edit, Fix, place_of
from elasticrun.lint.graph import EpochLoop
from elasticrun.lint.naming import written
from elasticrun.lint.project import Module


def move_to_end(at: ast.AST, epoch: EpochLoop | None, module: Module) -> Fix | None:
    """Return the fix that moves a statement to the end of the epoch's body.

    Only a simple statement that stands in the epoch's own body, alone on its lines, is
    moved: one in a branch or function would change its meaning on the way.
    """
    if (
        epoch is None
        or epoch.module is not module
        or not isinstance(epoch.node, ast.For)
    ):
        return None
    body = epoch.node.body
    line = getattr(at, "lineno", 0)
    found = [each for each in body if each.lineno <= line <= (each.end_lineno or 0)]
    if len(found) != 1 or found[0] is body[-1]:
        return None
    statement = found[0]
    if not isinstance(statement, ast.Expr | ast.AugAssign | ast.Assign):
        return None
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    if not _is_alone(statement, module):
        return None
    end = body[-1].end_lineno or 0
    lines = _lines(module)
    text = "".join(lines[first - 1 : last])
    if not text.endswith(("\n", "\r")):
        return None
    if not lines[end - 1].endswith(("\n", "\r")):
        text = text[len(text.rstrip("\r\n")) :] + text.rstrip("\r\n")
        insertion = Edit((end, len(lines[end - 1])), (end, len(lines[end - 1])), text)
    else:
        insertion = Edit((end + 1, 0), (end + 1, 0), text)
    removal = Edit((first, 0), (last + 1, 0), "")
    title = "Move it to the end of the epoch's body"
    return Fix((removal, insertion), False, title)


def _lines(module: Module) -> list[str]:
    """Return the lines with their ends, cut where the parser cuts them."""
    lines: list[str] = []
    start = 0
    text = module.text
    for line in module.lines:
        end = start + len(line)
        ending = "\r\n" if text.startswith("\r\n", end) else text[end : end + 1]
        lines.append(line + ending)
        start = end + len(ending)
    return lines


def _is_alone(statement: ast.stmt, module: Module) -> bool:
    first = module.line(statement.lineno)
    last = module.line(statement.end_lineno or statement.lineno)
    _, start, _, end = place_of(statement, module)
    rest = last[end - 1 :].strip()
    return not first[: start - 1].strip() and (not rest or rest.startswith("#"))


def add_argument(node: ast.AST, argument: str, module: Module) -> Fix | None:
    """Return the fix that gives a call one more argument."""
    if not isinstance(node, ast.Call):
        return None
    _, _, line, column = place_of(node, module)
    text = module.line(line)
    if text[column - 2 : column - 1] != ")":
        return None
    before = text[: column - 2].rstrip()
    has_comma = before.endswith(",") or not (node.args or node.keywords)
    if not before:
        return None
    new = argument if has_comma else f", {argument}"
    if before.endswith(","):
        new = f" {argument}"
    position = (line, len(before))
    return Fix((Edit(position, position, new),), True, f"Pass {argument}")


def replace(
    node: ast.AST, new: str, module: Module, *, title: str, is_safe: bool
) -> Fix | None:
    """Return the fix that writes something else for an expression on one line."""
    line, column, end_line, end_column = place_of(node, module)
    if line != end_line:
        return None
    edit = Edit((line, column - 1), (line, end_column - 1), new)
    return Fix((edit,), is_safe, title)


def true_enumerate(loop: ast.AST, module: Module) -> Fix | None:
    """Return the fix from `enumerate(loader)` to `loader.enumerate()`."""
    source = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(source, ast.Call) or len(source.args) != 1 or source.keywords:
        return None
    name = source.func.id if isinstance(source.func, ast.Name) else ""
    inner = source.args[0]
    if name != "enumerate" or not isinstance(inner, ast.Name | ast.Attribute):
        return None
    new = f"{written(inner)}.enumerate()"
    return replace(source, new, module, title="Count from the true index", is_safe=True)


def bare_handler(handler: ast.ExceptHandler, module: Module) -> Fix | None:
    """Return the fix from a handler that catches the stop to one that does not."""
    if handler.type is not None:
        if written(handler.type) != "BaseException":
            return None
        return replace(
            handler.type, "Exception", module, title="Catch Exception", is_safe=False
        )
    line = module.line(handler.lineno)
    start = len(line) - len(line.lstrip())
    if not line.startswith("except", start):
        return None
    position = (handler.lineno, start + len("except"))
    edit = Edit(position, position, " Exception")
    return Fix((edit,), False, "Catch Exception")
