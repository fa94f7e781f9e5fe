"""For ER003: values that live over epochs, and are the same on all replicas."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from elasticrun.lint.editing import Edit, inserted
from elasticrun.lint.naming import last_name, named
from elasticrun.lint.rules.counting import given_before, variables
from elasticrun.lint.rules.summing import Loaders, has_backward_pass
from elasticrun.lint.rules.writing import READERS
from elasticrun.lint.script import Loop, Name, Script, is_stored

_JUMPS = ast.Continue | ast.Break | ast.Return | ast.Raise
_SAME_CALLS = named("min max abs round float int bool sum len")


class Kept:
    """Values that a later turn of a loop reads, and that are the same on all replicas.

    Args:
        counting: The loops over epochs and steps.
        summed: The names to which sums are added that are Accumulators then.
    """

    def __init__(
        self,
        script: Script,
        loaders: Loaders,
        counting: set[Loop],
        summed: set[ast.AST],
    ) -> None:
        self._script, self._loaders = script, loaders
        self._counting, self._summed = counting, summed
        self._open: set[str] = set()

    def edits(self) -> Iterator[Edit]:
        """Yield what makes Variables of them."""
        every = [each for loop in self._counting for each in self._candidates(loop)]
        kept = [each for each in every if self._is_same_name(each[1][0].id)]
        for loop, (first, *others) in kept:
            late = [each for each in others if each.lineno > loop.lineno]
            value = self._script.assigned(first)
            is_only = not any(is_stored(e) and e not in late for e in others)
            if value and is_only and given_before(self._script, first, loop):
                label = f', name="{first.id}"' if len(kept) > 1 else ""
                yield inserted(value, "elasticrun.Variables(value=", behind=False)
                yield inserted(value, f"{label})", behind=True)
                late = others
            else:
                is_fixed = not any(map(is_stored, late))
                late = [] if is_fixed else late
                line = f"{first.id} = {variables(first.id)}{'.value' * is_fixed}"
                yield Edit(loop, "", line, place="before")
            for each in late:
                yield inserted(each, ".value", behind=True)

    def _candidates(self, loop: Loop) -> Iterator[tuple[Loop, list[ast.Name]]]:
        """Yield where each name stands that may be kept, first where it begins."""
        inside = set(ast.walk(loop))
        head = loop.test if isinstance(loop, ast.While) else loop.iter
        counters = {ast.unparse(each) for each in ast.walk(head)}  # by themselves
        names = {e.id for e in inside if isinstance(e, ast.Name)}
        for name in sorted(names - counters):
            mentions = self._script.mentions(name, self._script.scope(loop))
            stores = [e for e in mentions if not isinstance(e.ctx, ast.Load)]
            early = [e for e in stores if e not in inside]
            if (
                early
                and stores[0] is mentions[0]
                and self._script.statement(early[0]) in self._script.body_of(loop)
                and (
                    _is_read_first(loop, inside.intersection(mentions))
                    if early != stores
                    else any(map(self._is_loaded, early))
                )
                and all(map(self._can_grow, mentions[1:]))
                and (
                    _is_number(self._script.assigned(early[0]))
                    or not any(map(self._is_loaded, early))
                )
            ):
                yield loop, mentions

    def _is_loaded(self, store: Name) -> bool:
        """Return whether a branch that loads an own checkpoint stores a name."""
        return not self._script.loop(store) and any(
            isinstance(node, ast.Call) and self._script.origin(node.func) in READERS
            for branch in self._script.above(store)
            if isinstance(branch, ast.If) and not self._counting & {*ast.walk(branch)}
            for node in ast.walk(branch)
        )

    def _can_grow(self, name: ast.Name) -> bool:
        """Return whether `.value` can be written behind a name."""
        if not isinstance(name.ctx, ast.Load):
            kinds = ast.Assign | ast.AugAssign
            return isinstance(self._script.statement(name), kinds)
        above = self._script.above(name)
        texts = [ast.unparse(e) for e in above if isinstance(e, ast.JoinedStr)]
        # Python 3.10 does not know where it stands in there; `{x=}` shows its name.
        is_plain = not any(f"{name.id}={{{name.id}!r" in each for each in texts)
        return not texts or (sys.version_info >= (3, 11) and is_plain)

    # What is the same on all replicas.

    def _is_same_name(self, name: str) -> bool:
        if name in self._open:
            return True  # It is asked for already, and is so if all else is.
        self._open.add(name)
        stores, given = self._loaders.stores(name)
        is_same = all(map(self._is_same_store, stores)) and all(
            map(self._is_same, given)
        )
        self._open.remove(name)
        return is_same and bool(stores or given)

    def _is_same_store(self, store: Name) -> bool:
        around = self._script.parents[store]
        is_counter = around in self._counting or store in self._summed
        if is_counter or self._is_loaded(store):
            return True
        loop = self._script.parents[around]
        if loop in self._loaders.loops and isinstance(around, ast.Tuple):
            return bool(self._loaders.numbered(loop)) and store is around.elts[0]
        value = self._script.assigned(store)
        if isinstance(around, ast.AugAssign):
            value = around.value
        above = self._script.above(store)
        return self._is_same(value) and all(map(self._runs_alike, above))

    def _runs_alike(self, node: ast.AST) -> bool:
        """Return whether all replicas come alike to what stands in a statement."""
        if isinstance(node, ast.If):
            is_main = ast.unparse(node.test).startswith("__name__")
            return is_main or self._is_same(node.test)
        if isinstance(node, ast.For) and node in self._loaders.loops:
            jumps = (e for e in ast.walk(node) if isinstance(e, _JUMPS))
            return has_backward_pass(self._script, node) and all(
                self._is_same(e.test)
                for jump in jumps
                for e in self._script.above(jump)
                if isinstance(e, ast.If)
            )
        is_other = isinstance(node, ast.For | ast.While | ast.Try)
        return not is_other or node in self._counting

    def _is_same(self, node: ast.expr | None) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(name):
                return self._is_same_name(name)
            case ast.Attribute(ast.Name(name)):
                values = self._loaders.values(name)
                calls = [e for e in values if isinstance(e, ast.Call)]
                are_options = all(last_name(e.func) == "parse_args" for e in calls)
                return bool(values) and len(calls) == len(values) and are_options
            case ast.Call(func, args):
                if last_name(func) == "len" and args and self._is_data(args[0]):
                    return True
                origin = self._script.origin(func)
                if ast.unparse(func) in _SAME_CALLS or origin.startswith("math."):
                    return all(map(self._is_same, args))
                return self._is_same(self._script.returned(node))
            case (
                ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp() | ast.IfExp()
            ):
                parts = ast.iter_child_nodes(node)
                return all(self._is_same(e) for e in parts if isinstance(e, ast.expr))
        return False

    def _is_data(self, node: ast.expr) -> bool:
        return last_name(node) == "dataset" or bool(self._loaders.of(node))


def _is_number(node: ast.expr | None) -> bool:
    text = ast.unparse(node) if node else ""
    return re.fullmatch(r"-?(float\('-?inf'\)|[\d.e+]+)", text) is not None


def _is_read_first(loop: Loop, mentions: set[ast.AST]) -> bool:
    """Return whether a turn of a loop may read what an earlier one has stored."""
    for statement in loop.body:
        nodes = set(ast.walk(statement))
        added = {e.target for e in nodes if isinstance(e, ast.AugAssign)}
        own = nodes & mentions
        if any(not is_stored(each) or each in added for each in own):
            return True
        if own and isinstance(statement, ast.Assign):
            return False
    return False
