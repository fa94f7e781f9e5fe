"""For ER003: files that all replicas write, and which one of them is to write."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elasticrun.lint.editing import Edit
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.script import Script

_WRITERS = named("""
    torch.save torch.jit.save numpy.save numpy.savez numpy.savetxt json.dump pickle.dump
    torchvision.utils.save_image matplotlib.pyplot.savefig
""")
READERS = named("torch.load torch.jit.load numpy.load json.load pickle.load")
_IN_BLOCKS = named("write writelines dump dumps print save")
_HARMLESS = named("""
    state_dict cpu detach numpy item tolist items keys values join format str int float
    len dict list tuple Path
""")


def files(script: Script) -> Iterator[Edit]:
    """Yield what lets rank 0 alone write a file that no other one reads.

    What a call computes that it writes, all replicas compute before it.
    """
    found = [e for e in script.nodes if isinstance(e, ast.stmt) and _writes(script, e)]
    names = {each.id for each in script.nodes if isinstance(each, ast.Name)}
    name = next(
        each for each in ("saved", "saved_now", "saved_here") if each not in names
    )
    for statement in found:
        body, computed = script.body_of(statement), _computed(statement)
        number = body.index(statement)
        lines = [f"{name} = {ast.unparse(each)}" for each in computed[:1]]
        if lines or not number or body[number - 1] not in found:
            lines.append("if elasticrun.rank() == 0:")
            yield Edit(statement, "", "\n".join(lines), place="before")
        yield from (Edit(each, "", name) for each in computed[:1])
        yield Edit(statement, "", "    ", place="indent")


def _computed(node: ast.stmt) -> list[ast.expr]:
    """Return what a call is given first, and all in it, if that calls something."""
    match node:
        case ast.Expr(ast.Call(_, [given, *_])):
            inside = [each for each in ast.walk(given) if isinstance(each, ast.expr)]
            calls = (last_name(e.func) for e in inside if isinstance(e, ast.Call))
            return inside if set(calls) - _HARMLESS else []
    return []


def _writes(script: Script, node: ast.stmt) -> bool:
    """Return whether a statement does nothing but write a file that is not read."""
    match node:
        case ast.Expr(ast.Call() as call) if script.origin(call.func) in _WRITERS:
            harmless = _HARMLESS
        case ast.With(
            [ast.withitem(ast.Call(ast.Name("open"), [_, ast.Constant(mode)]) as call)]
        ) if str(mode).startswith("w") and all(
            isinstance(e, ast.Expr) for e in node.body
        ):
            harmless = _HARMLESS | _IN_BLOCKS
        case _:
            return False
    computed = {*_computed(node), call}
    for each in ast.walk(node):
        match each:
            case ast.Constant() | ast.JoinedStr() if each.lineno != each.end_lineno:
                return False  # Lines of a text cannot be indented.
            case ast.Call(func) if last_name(func) not in harmless:
                if each not in computed:
                    return False
            case ast.Await() | ast.Yield() | ast.NamedExpr():
                return False
    is_read = any(_may_read(script, each, node) for each in script.nodes)
    is_opened = any(isinstance(e, ast.With) and _opens(e) for e in script.above(node))
    return script.has_own_lines(node) and not is_read and not is_opened


def _opens(block: ast.With) -> bool:
    """Return whether a file is opened for what stands in a block."""
    return any("open(" in ast.unparse(each.context_expr) for each in block.items)


def _may_read(script: Script, node: ast.AST, written: ast.stmt) -> bool:
    """Return whether another replica may read what rank 0 has not written yet."""
    if not isinstance(node, ast.Call) or script.origin(node.func) not in READERS:
        return False
    if script.scope(node) is script.scope(written) and not script.loop(node):
        return node.lineno > written.lineno
    read, write = (
        [e.lineno for e in script.at_top if e is each or e in script.around(each)]
        for each in (node, written)
    )
    return not read or not write or max(read) >= min(write)
