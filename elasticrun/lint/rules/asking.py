"""For ER003: loops that ask iterators by hand, which become loops over the loaders."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

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


class _Iterator(NamedTuple):
    """What a script makes of a loader, to be asked by hand.

    Attributes:
        functions: The generator that makes it, which never ends; else it is of `iter`.
    """

    made: ast.Assign
    loader: ast.expr
    functions: list[ast.FunctionDef]


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
                asks = dict(_asks(script, loop, iterators))
            case _:
                continue
        of = [iterators[name] for name in asks.values()]
        nodes = {e for part in (*asks, *(i.made for i in of)) for e in ast.walk(part)}
        read = {each for each in used[counter] if not is_stored(each)}
        if (
            of
            and len(set(asks.values())) == len(asks)
            and all(used[name] <= nodes for name in asks.values())
            and all(each.made in script.body_of(of[0].made) for each in of)
            and read <= set(ast.walk(loop))
            and script.has_own_lines(loop.body[0])
        ):
            nodes |= {e for each in of for f in each.functions for e in ast.walk(f)}
            over, edits = _edits(
                script, loop, list(asks.items()), of, counter if read else ""
            )
            yield Asked(loop, over, edits, nodes)


def _edits(
    script: Script,
    loop: ast.For,
    asks: list[tuple[ast.AST, str]],
    of: list[_Iterator],
    counter: str,
) -> tuple[str, list[Edit]]:
    """Return what is looped over, and what becomes of the loop and its iterators."""
    names = {each.id for each in script.nodes if isinstance(each, ast.Name)}
    batch, over = (
        next(
            each
            for each in (name, f"next_{name}", f"asked_{name}")
            if each not in names
        )
        for name in ("batch", "loaders")
    )
    given = ", ".join(ast.unparse(each.loader) for each in of)
    *others, last = (each.made for each in of)
    if others:
        made = f"{over} = elasticrun.CombinedLoader([{given}])"
        edits = [Edit(each, "") for each in others] + [_edit(last, made)]
    else:
        over, edits = asks[0][1], [_edit(last.value, given)]
    for at, (node, _) in enumerate(asks):
        new = f"{batch}[{at}]" if others else batch
        if isinstance(node, ast.Try):
            taken = ast.unparse(node.body[0])
            new = f"{taken[: taken.rindex(' = ')]} = {new}"
        edits.append(_edit(node, new))
    assert isinstance(loop.iter, ast.Call)
    edits.append(Edit(loop.target, "", batch))
    edits.append(_edit(loop.iter, f"{over}.batches({ast.unparse(loop.iter.args[0])})"))
    if counter:
        line = f"{counter} = {over}.batch_index"
        edits.append(Edit(loop.body[0], "", line, place="before"))
    return over, edits


def _edit(node: ast.AST, new: str) -> Edit:
    assert isinstance(node, ast.expr | ast.stmt)
    return Edit(node, _WHY.format(new), new)


def _iterators(script: Script, loaders: Loaders) -> Iterator[tuple[str, _Iterator]]:
    """Yield what iterates over one loader, made in no loop, by its name."""
    for node in script.nodes:
        match node:
            case ast.Assign(
                [ast.Name() | ast.Attribute() as name], ast.Call(func, [of], [])
            ):
                assert isinstance(node.value, ast.Call)
                functions = script.called(node.value)
                is_known = ast.unparse(func) == "iter" or any(
                    map(_never_ends, functions)
                )
                if is_known and len(loaders.of(of)) == 1 and not script.loop(node):
                    yield ast.unparse(name), _Iterator(node, of, functions)


def _never_ends(function: ast.FunctionDef) -> bool:
    """Return whether a generator yields the batches of a loader again and again."""
    match function.args.args, function.body:
        case [ast.arg(name)], [ast.While(ast.Constant(True | 1), [inner])]:
            shapes = (f"yield from {name}", f"for (\\w+) in {name}:\\s+yield \\1")
            return any(re.fullmatch(each, ast.unparse(inner)) for each in shapes)
    return False


def _asks(
    script: Script, loop: ast.For, iterators: dict[str, _Iterator]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what takes a batch of an iterator in each turn of a loop."""
    for statement in loop.body:
        match statement:
            case ast.Try([ast.Assign([_], value) as taken], [handler], [], []):
                if (name := _taken_of(value)) in iterators:
                    anew = [ast.unparse(each) for each in (iterators[name].made, taken)]
                    if [ast.unparse(each) for each in handler.body] == anew:
                        yield statement, name
            case ast.Assign() | ast.Expr() | ast.AugAssign():
                inside = list(ast.walk(statement))
                for node in inside:
                    around = set(script.above(node)).intersection(inside)
                    is_sure = not any(isinstance(each, _MAYBE) for each in around)
                    name = _taken_of(node)
                    if name in iterators and is_sure and iterators[name].functions:
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
