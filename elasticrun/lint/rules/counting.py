"""For ER003: loops that count, with `range` or by hand, and where they begin."""

from __future__ import annotations

import ast
import re

from elasticrun.lint.editing import Edit
from elasticrun.lint.script import Loop, Name, Script, is_stored

AGAIN = "a restart would begin with the first of these {} again"


def until(what: str, start: ast.expr, end: ast.expr) -> str:
    """Return what counts epochs or steps from one number to another."""
    match ast.unparse(start), end:
        case "0", _:
            return f"elasticrun.remaining_{what}_until({ast.unparse(end)})"
        case "1", (
            ast.BinOp(rest, ast.Add(), ast.Constant(1))
            | ast.BinOp(ast.Constant(1), ast.Add(), rest)
        ):
            number = rest
        case _, ast.Constant(int(last)) if isinstance(start, ast.Constant):
            number = ast.Constant(last - int(ast.unparse(start)))
        case _:
            number = ast.BinOp(end, ast.Sub(), start)
    new = f"elasticrun.remaining_{what}_until({ast.unparse(number)}"
    return f"{new}, start={ast.unparse(start)})"


def start_kept(loop: Loop, start: ast.expr) -> list[Edit] | None:
    """Return what lets a loop begin with the same number after each restart.

    The number is that of the first start, whatever the script finds then, as a file
    that it has written itself. None if the number has no name.
    """
    if isinstance(start, ast.Constant):
        return [] if isinstance(start.value, int) else None
    name = ast.unparse(start)
    if not re.fullmatch(r"(\w+\.)*\w+", name):
        return None
    return [Edit(loop, "", f"{name} = {variables(name)}.value", place="before")]


def variables(name: str) -> str:
    """Return what keeps the value that a name has there."""
    return f'elasticrun.Variables(value={name}, name="{name.split(".")[-1]}")'


def counted(script: Script, loop: ast.While, what: str) -> list[Edit]:
    """Return what becomes of `while i < n`, if each turn has one `i += 1`."""
    match loop.test:
        case ast.Compare(ast.Name() | ast.Attribute() as counter, [ast.Lt()], [end]):
            name = ast.unparse(counter)
        case _:
            return []
    inside = script.reached([loop])
    stores, reads = _stores_and_reads(script, loop, counter)
    early = [each for each in stores if each not in inside]
    steps = [each for each in loop.body if ast.unparse(each) == f"{name} += 1"]
    changed = {ast.unparse(each) for each in inside if is_stored(each)}
    is_fixed = not any(
        isinstance(e, ast.Call | ast.Subscript) or ast.unparse(e) in changed
        for e in ast.walk(end)
    )
    goes_on = any(
        isinstance(e, ast.Continue) and script.loop(e) is loop for e in inside
    )
    is_counter = early and len(stores) == len(early) + 1 and reads <= inside and steps
    if not is_counter or not is_fixed or goes_on or loop.orelse or len(loop.body) < 2:
        return []
    begun = given_before(script, early[0], loop) if len(early) == 1 else ""
    start = ast.Constant(int(begun)) if begun.isdigit() else counter
    call = until(what, start, end)
    head = f"for {name} in {call}"
    why = f"{AGAIN.format(what)}: write `{head}`"
    word = ast.copy_location(ast.Name("while"), loop)
    word.end_lineno, word.end_col_offset = loop.lineno, loop.col_offset + len("while")
    is_last = steps == loop.body[-1:] and script.has_own_lines(steps[0])
    return [
        Edit(loop, why, f"{head}: pass", is_certain=False),
        Edit(word, "", f"for {name} in"),
        Edit(loop.test, "", call),
        *(start_kept(loop, start) or ()),
        *([Edit(steps[0], "")] if is_last else []),
    ]


def _stores_and_reads(
    script: Script, loop: Loop, counter: Name
) -> tuple[list[Name], set[Name]]:
    """Return where a counter is stored, and where it is read that the loop must be.

    Behind a loop that had ended before a restart, it is where it began.
    """
    if isinstance(counter, ast.Name):
        known = script.mentions(counter.id, script.scope(loop))
        late = {each for each in known if each.lineno > (loop.end_lineno or 0)}
        return [*filter(is_stored, known)], {e for e in late if not is_stored(e)}
    calls = {each.func for each in script.nodes if isinstance(each, ast.Call)}
    mentions = [
        each
        for each in script.nodes
        if isinstance(each, ast.Attribute) and each.attr == counter.attr
        if each not in calls
    ]
    return [*filter(is_stored, mentions)], {e for e in mentions if not is_stored(e)}


def given_before(script: Script, name: Name, loop: Loop) -> str:
    """Return what a name is given in front of a loop, in the same statements."""
    value, statement = script.assigned(name), script.statement(name)
    is_before = (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and statement.lineno < loop.lineno
        and script.parents[statement] is script.parents[loop]
    )
    return ast.unparse(value) if is_before and value else ""
