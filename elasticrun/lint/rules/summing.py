"""For ER003: the loops over loaders that a patch converts, and the sums over them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elasticrun.lint.editing import Edit, inserted
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.script import Loop, Name, Script, is_stored

BARS = named("tqdm track")
_NUMBERS = named("item float int")
_SAME_VALUE = _NUMBERS | named("detach cpu double clone type to")
_REDUCTIONS = named("sum mean std var norm prod max min median amax amin logsumexp")
_OTHER_MEANS = named("weight pos_weight ignore_index size_average reduce")
_LOSS = re.compile(r"torch\.nn\..*(?i:loss|entropy)")
_OF_LOSS = re.compile("loss|criterion|entropy", re.IGNORECASE)
_TENSOR = "tensor "


def below(iterated: ast.expr, around: frozenset[str]) -> ast.expr:
    """Return what is iterated below a bar, `enumerate` or their like."""
    while isinstance(iterated, ast.Call) and iterated.args:
        if last_name(iterated.func) not in around:
            break
        iterated = iterated.args[0]
    return iterated


class Loaders:
    """The loaders that a patch converts, and where a script uses them.

    Attributes:
        loops: The loops over them, each with the loader as the script calls it.
    """

    def __init__(self, script: Script, made: Iterable[ast.Call]) -> None:
        self._script = script
        self._made = set(made)
        self._stored: dict[str, list[Name]] = defaultdict(list)
        self._taken: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        for node in script.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and is_stored(node):
                self._stored[ast.unparse(node)].append(node)
            elif isinstance(node, ast.FunctionDef):
                for each in ast.walk(node.args):
                    if isinstance(each, ast.arg):
                        self._taken[each.arg].append(node)
        self._known: dict[str, set[ast.Call]] = {}
        self._open: set[tuple[str, ast.AST]] = set()  # Names that are being asked for.
        over = {
            node: below(node.iter, BARS | {"enumerate"})
            for node in script.nodes
            if isinstance(node, ast.For)
        }
        self.loops = {loop: loader for loop, loader in over.items() if self.of(loader)}

    def values(self, name: str) -> list[ast.expr | None]:
        """Return all that a name stands for in the file; None for what is unknown."""
        stores, given = self.stores(name)
        return [*(self._script.assigned(each) for each in stores), *given]

    def stores(self, name: str) -> tuple[list[Name], list[ast.expr | None]]:
        """Return where a name is stored, and what it is given as a parameter."""
        functions = self._taken.get(name, ())
        given = (self._script.given(name, each) for each in functions)
        return self._stored.get(name, []), [each for calls in given for each in calls]

    def of(
        self, node: ast.expr | None, asked: frozenset[str] = frozenset()
    ) -> set[ast.Call]:
        """Return which of the loaders an expression is; none if it may be another."""
        may_be_one = isinstance(node, ast.Call | ast.Name | ast.Attribute)
        if not self._made or node is None or not may_be_one:
            return set()
        if node in self._made:
            return {node}
        text = ast.unparse(node)
        if text in self._known:
            return self._known[text]
        values = self.values(text)
        if isinstance(node, ast.Call):
            values = [self._script.returned(node)]
        new = [e for e in values if e is None or ast.unparse(e) not in asked | {text}]
        found = [self.of(each, asked | {text}) for each in new]
        together = set().union(*found) if all(found) else set()
        if not asked:  # Else those that ask are missing among them.
            self._known[text] = together
        return together

    def in_loop(self, node: ast.AST) -> ast.For | None:
        """Return the loop over a loader in which something stands, the inner one."""
        above = self._script.above(node)
        return next(
            (e for e in above if isinstance(e, ast.For) and e in self.loops), None
        )

    def numbered(self, loop: ast.For) -> ast.Call | None:
        """Return the `enumerate` of a loop that numbers the loader's own batches."""
        match below(loop.iter, BARS):
            case ast.Call(_, [only] | [only, ast.Constant(0)], []) as call:
                return call if only is self.loops[loop] else None
        return None

    def enumerated(self) -> Iterator[Edit]:
        """Yield what numbers the batches of a loop."""
        for loop, loader in self.loops.items():
            if call := self.numbered(loop):
                yield Edit(call, "", f"{ast.unparse(loader)}.enumerate()")

    # What the number is that a loop adds up.

    def meaning(self, node: ast.expr | None, scope: ast.AST) -> str:
        """Return "sum" or "mean" for one over the samples of a batch.

        Or "count" for how many they are, "number" for a constant, and nothing for what
        may be something else; "tensor sum" for one that is no number of Python's yet.
        """
        match node:
            case ast.Constant(int() | float()):
                return "number"
            case ast.Subscript(ast.Attribute(_, "shape"), ast.Constant(0)):
                return "count"
            case ast.Name(name):
                stored = filter(is_stored, self._script.mentions(name, scope))
                values = [self._script.assigned(each) for each in stored]
                return self._agreed(name, scope, values)
            case ast.UnaryOp(ast.USub(), value):
                return self.meaning(value, scope)
            case ast.BinOp(left, operator, right):
                parts = self.meaning(left, scope), self.meaning(right, scope)
                one, other = (each.removeprefix(_TENSOR) for each in parts)
                both = _COMBINED.get((type(operator), one, other), "")
                is_tensor = both and parts != (one, other)
                return f"{_TENSOR}{both}" if is_tensor else both
            case ast.Call():
                return self._meaning_of_call(node, scope)
        return ""

    def _agreed(self, name: str, scope: ast.AST, values: list[ast.expr | None]) -> str:
        """Return the meaning that all values of a name have."""
        if (name, scope) in self._open:
            return ""
        self._open.add((name, scope))
        found = {self.meaning(each, scope) for each in values}
        self._open.remove((name, scope))
        return found.pop() if len(found) == 1 else ""

    def _meaning_of_call(self, call: ast.Call, scope: ast.AST) -> str:
        name, origin = last_name(call.func), self._script.origin(call.func)
        given = call.args
        if isinstance(call.func, ast.Attribute) and not origin:
            given = [call.func.value, *given]
        if ast.unparse(call).endswith(".size(0)"):
            return "count"
        if name == "len" and given and self._is_of_batch(given[0]):
            return "count"
        if name in ("sum", "mean") and isinstance(call.func, ast.Attribute) and given:
            text = ast.unparse(given[0])
            if own := self.meaning(given[0], scope):
                return own  # It is one number already.
            may_be_one = _OF_LOSS.search(text) and "reduction='none'" not in text
            reduces = may_be_one or any(map(_reduces, ast.walk(given[0])))
            is_whole = len(given) == 1 and not call.keywords
            return f"{_TENSOR}{name}" if is_whole and not reduces else ""
        if name in _SAME_VALUE and given:
            same = self.meaning(given[0], scope)
            return same.removeprefix(_TENSOR) if name in _NUMBERS else same
        if value := self._script.returned(call):
            return self._agreed(f"{name}()", self._script.scope(value), [value])
        if origin:
            return self._reduction(call, 2)
        found = {self._reduction(e, 0) for e in self.values(ast.unparse(call.func))}
        return found.pop() if len(found) == 1 else ""

    def _is_of_batch(self, node: ast.expr) -> bool:
        """Return whether it is a part of a batch, whose length is that of the batch."""
        loop = self.in_loop(node)
        batch = loop and loop.target
        if loop and self.numbered(loop):
            batch = getattr(batch, "elts", [batch])[-1]
        parts = getattr(batch, "elts", ())
        return ast.unparse(node) in map(ast.unparse, parts)

    def _reduction(self, call: ast.expr | None, num_inputs: int) -> str:
        """Return how a loss of torch's reduces those of the samples."""
        if not isinstance(call, ast.Call) or len(call.args) > num_inputs:
            return ""
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        is_loss = _LOSS.match(self._script.origin(call.func))
        reduction = given.get("reduction", "'mean'").strip("'")
        is_known = is_loss and reduction in ("mean", "sum")
        return (
            f"{_TENSOR}{reduction}"
            if is_known and not given.keys() & _OTHER_MEANS
            else ""
        )


# What two numbers are together: sums add up, and means do with equal weights.
_COMBINED: dict[tuple[type[ast.operator], str, str], str] = {
    (ast.Mult, "mean", "count"): "sum",
    (ast.Mult, "count", "mean"): "sum",
    (ast.Div, "sum", "count"): "mean",
    **{(op, e, e): e for op in (ast.Add, ast.Sub) for e in ("sum", "mean", "count")},
    **{(op, e, "number"): e for op in (ast.Mult, ast.Div) for e in ("sum", "mean")},
    **{(ast.Mult, "number", each): each for each in ("sum", "mean")},
}


def has_backward_pass(script: Script, loop: Loop) -> bool:
    """Return whether something trains in a loop."""
    calls = (e for e in script.reached(loop.body) if isinstance(e, ast.Call))
    return any(last_name(each.func) == "backward" for each in calls)


def _reduces(node: ast.AST) -> bool:
    """Return whether a node may make one number of several samples."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in _REDUCTIONS:
        return False
    given = [*node.args, *(each.value for each in node.keywords)]
    return not any(ast.unparse(each) in ("1", "-1") for each in given)


# Sums.


class _Sum(NamedTuple):
    """A name that a loop adds to.

    Attributes:
        begun: The statement that gives it 0.
        is_mean: Whether means over batches are added, and not sums over samples.
        show: What makes a number of the script's kind of the total.
    """

    name: str
    begun: ast.stmt
    added: list[ast.AugAssign]
    is_mean: bool
    show: str


def sums(
    script: Script, loaders: Loaders, steps: set[Loop], name: str
) -> Iterator[Edit]:
    """Yield what makes Accumulators of sums over loops.

    Behind the loop is the number that one replica would have: sums over samples are
    added up, and means have their batch's share as weight.

    Args:
        steps: The loops over steps, in which no Accumulator can be made.
    """
    begun: set[ast.stmt] = set()
    for loop, loader in loaders.loops.items():
        found = list(_sums_of(script, loaders, loop, steps))
        if not found:
            continue
        over = ast.unparse(loader)
        for each in found:
            weight = f" * ({over}.num_valid > 0)"  # none of padding
            if each.is_mean:
                weight = f" * {over}.loss_weight / elasticrun.world_size()"
            for added in each.added:
                yield Edit(added.target, "", f'{name}["{each.name}"]')
                yield from _times(added.value, weight)
        yield from _begun(name, {each.begun for each in found} - begun, found)
        begun |= {each.begun for each in found}
        lines = [f"with {name}.synchronized():"]
        for each in found:
            total = each.show.format(f'{name}["{each.name}"]')
            lines.append(f"    {each.name} = {total}")
        yield Edit(loop, "", "\n".join(lines), place="behind")


def _times(value: ast.expr, weight: str) -> Iterator[Edit]:
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub)
    if is_sum:
        yield inserted(value, "(", behind=False)
    yield inserted(value, ")" * is_sum + weight, behind=True)


def _begun(name: str, statements: set[ast.stmt], found: list[_Sum]) -> Iterator[Edit]:
    """Yield what makes an Accumulator instead of the last zeros, or behind them."""
    names = {each.name for each in found}
    new = f"{name} = elasticrun.Accumulator()"
    for number, each in enumerate(sorted(statements, key=lambda e: -e.lineno)):
        if {e.id for e in ast.walk(each) if isinstance(e, ast.Name)} <= names:
            yield Edit(each, "", "" if number else new)
        elif not number:
            yield Edit(each, "", new, place="behind")


def _sums_of(
    script: Script, loaders: Loaders, loop: ast.For, steps: set[Loop]
) -> Iterator[_Sum]:
    inside, scope = set(ast.walk(loop)), script.scope(loop)
    is_left = any(isinstance(each, ast.Return | ast.Yield) for each in inside)
    around = script.around(loop) & {*steps, *loaders.loops}
    if is_left or around or not script.has_own_lines(loop):
        return
    added: dict[str, list[ast.AugAssign]] = defaultdict(list)
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(ast.Name(name), ast.Add()):
                if loaders.in_loop(node) is loop:
                    added[name].append(node)
    for name, each in added.items():
        mentions = script.mentions(name, scope)
        own = {e for e in mentions if e in inside}
        is_read = any(e.lineno > (loop.end_lineno or 0) for e in mentions)
        begun, zero = _begun_at(script, loop, mentions)
        if not begun or not is_read or own != {e.target for e in each}:
            continue
        meanings = {loaders.meaning(e.value, scope) for e in each}
        is_whole = all(ast.unparse(e.value) == "1" for e in each)
        show = "float({})" if zero == "0.0" else "{}"
        if meanings <= {"sum", "count"}:
            yield _Sum(name, begun, each, False, show)
        elif is_whole:  # With shares as weights it is whole up to rounding.
            yield _Sum(name, begun, each, True, show.format("round({})"))
        elif meanings == {"mean"}:
            yield _Sum(name, begun, each, True, "{}")


def _begun_at(
    script: Script, loop: ast.For, mentions: list[ast.Name]
) -> tuple[ast.stmt | None, str]:
    """Return the statement in front of a loop that gives 0 to a name, and this 0.

    Nothing that stands between them knows the name, and nothing but `with` is around
    one of them alone.
    """
    top: ast.AST = loop
    while isinstance(script.parents[top], ast.With):
        top = script.parents[top]
    early = [each for each in mentions if each.lineno < loop.lineno]
    for statement in script.body_of(top) if early else ():
        own = [each for each in ast.walk(statement) if each in mentions]
        if own == early[-1:] and isinstance(statement, ast.Assign):
            value = script.assigned(early[-1])
            zero = ast.unparse(value) if value else ""
            if zero in ("0", "0.0") and script.has_own_lines(statement):
                return statement, zero
    return None, ""
