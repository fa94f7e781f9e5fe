"""For ER003: loops that ask iterators by hand, which become loops over the loaders."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from elasticrun.lint.editing import Edit
from elasticrun.lint.rules.summing import Loaders
from elasticrun.lint.script import Script, is_stored

_WHY = "an iterator of one's own is not at its place after a restart: write `{}`"
_JUMPS = ast.Continue | ast.Break | ast.Return
_MAYBE = ast.Lambda | ast.IfExp | ast.BoolOp | ast.comprehension


class Asked(NamedTuple):
    """A loop over `range(n)` that becomes one over the batches that it asks for.

    Attributes:
        over: What is looped over then.
        nodes: All that asks iterators, of which nothing is left.
    """

    loop: ast.For
    over: str
    edits: list[Edit]
    nodes: set[ast.AST]


# What a script makes of a loader, to be asked by hand, by its name: the statement, the
# loader, and the generator that it calls if that is not `iter`.
_Iterators = dict[str, tuple[ast.Assign, ast.expr, list[ast.FunctionDef]]]


def asked_loops(script: Script, loaders: Loaders) -> Iterator[Asked]:
    """Yield the loops each turn of which takes a batch of each of some loaders.

    Nothing else may know the iterators, and where one has ended it is made anew.
    """
    iterators = dict(_iterators(script, loaders))
    used: dict[str, set[ast.AST]] = defaultdict(set)
    for node in script.nodes if iterators else ():
        if isinstance(node, ast.Name | ast.Attribute):
            used[ast.unparse(node)].add(node)
    for loop in script.nodes if iterators else ():
        match loop:
            case ast.For(
                ast.Name(counter), ast.Call(ast.Name("range"), [_], []), _, []
            ):
                asks = list(_asks(script, loop, iterators))
            case _:
                continue
        made = [iterators[name][0] for _, name in asks]
        nodes = {e for part in (*made, *(e for e, _ in asks)) for e in ast.walk(part)}
        read = {each for each in used[counter] if not is_stored(each)}
        if (
            made
            and len(set(made)) == len(made)
            and all(used[name] <= nodes for _, name in asks)
            and all(each in script.body_of(made[0]) for each in made)
            and read <= set(ast.walk(loop))
            and script.has_own_lines(loop.body[0])
        ):
            functions = [e for _, name in asks for e in iterators[name][2]]
            nodes |= {node for each in functions for node in ast.walk(each)}
            given = ", ".join(ast.unparse(iterators[name][1]) for _, name in asks)
            names = {each for each in used if each.isidentifier()}
            over = asks[0][1] if len(asks) == 1 else _fresh("loaders", names)
            edits = _edits(loop, over, _fresh("batch", names), asks)
            if len(asks) > 1:
                new = f"{over} = elasticrun.CombinedLoader([{given}])"
                edits += [_edit(made[-1], new), *(Edit(e, "") for e in made[:-1])]
            else:
                edits.append(_edit(made[0].value, given))
            if read:
                line = f"{counter} = {over}.batch_index"
                edits.append(Edit(loop.body[0], "", line, place="before"))
            yield Asked(loop, over, edits, nodes)


def _fresh(name: str, names: set[str]) -> str:
    return next(e for e in (name, f"next_{name}", f"asked_{name}") if e not in names)


def _edits(
    loop: ast.For, over: str, batch: str, asks: list[tuple[ast.AST, str]]
) -> list[Edit]:
    """Return what becomes of a loop's head, and of where it asks."""
    assert isinstance(loop.iter, ast.Call)
    number = ast.unparse(loop.iter.args[0])
    edits = [Edit(loop.target, "", batch)]
    edits.append(_edit(loop.iter, f"{over}.batches({number})"))
    for at, (node, _) in enumerate(asks):
        new = f"{batch}[{at}]" if len(asks) > 1 else batch
        if isinstance(node, ast.Try):
            taken = ast.unparse(node.body[0])
            new = f"{taken[: taken.rindex(' = ')]} = {new}"
        edits.append(_edit(node, new))
    return edits


def _edit(node: ast.AST, new: str) -> Edit:
    assert isinstance(node, ast.expr | ast.stmt)
    return Edit(node, _WHY.format(new), new)


def _iterators(script: Script, loaders: Loaders) -> Iterator[tuple[str, Any]]:
    """Yield what iterates over one loader, made in no loop, by its name."""
    for node in script.nodes:
        match node:
            case ast.Assign([ast.Name() | ast.Attribute() as name], ast.Call() as call):
                functions = script.called(call)
                is_iterator = ast.unparse(call.func) == "iter" or (
                    any(map(_never_ends, functions))
                )
                if not is_iterator or len(call.args) != 1 or script.loop(node):
                    continue
                if len(loaders.of(call.args[0])) == 1:
                    yield ast.unparse(name), (node, call.args[0], functions)


def _never_ends(function: ast.FunctionDef) -> bool:
    """Return whether a generator yields the batches of a loader again and again."""
    match function.args.args, function.body:
        case [ast.arg(name)], [ast.While(ast.Constant(True | 1), [inner])]:
            shapes = (f"yield from {name}", f"for (\\w+) in {name}:\\s+yield \\1")
            return any(re.fullmatch(each, ast.unparse(inner)) for each in shapes)
    return False


def _asks(
    script: Script, loop: ast.For, iterators: _Iterators
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what takes a batch of an iterator in each turn of a loop."""
    for statement in loop.body:
        match statement:
            case ast.Try([ast.Assign([_], value) as taken], [handler], [], []):
                if (name := _taken_of(value)) in iterators:
                    anew = [ast.unparse(each) for each in (iterators[name][0], taken)]
                    if [ast.unparse(each) for each in handler.body] == anew:
                        yield statement, name
            case ast.Assign() | ast.Expr() | ast.AugAssign():
                inside = list(ast.walk(statement))
                for node in inside:
                    around = set(script.above(node)).intersection(inside)
                    is_sure = not any(isinstance(each, _MAYBE) for each in around)
                    name = _taken_of(node)
                    if name in iterators and is_sure and iterators[name][2]:
                        yield node, name
        if any(isinstance(each, _JUMPS) for each in ast.walk(statement)):
            return


def _taken_of(node: ast.AST) -> str:
    """Return the iterator of which something is the next batch."""
    match node:
        case ast.Call(ast.Name("next"), [of], []) | ast.Call(
            ast.Attribute(of, "next"), []
        ):
            return ast.unparse(of)
    return ""
