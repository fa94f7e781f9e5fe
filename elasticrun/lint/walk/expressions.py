"""Expressions: what they may be, and which places they read."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from elasticrun.lint import roles
from elasticrun.lint.graph import TEST
from elasticrun.lint.values import (
    EMPTY,
    Value,
    constant,
    is_key,
    join,
    unknown,
)
from elasticrun.lint.walk.attributes import Attributes
from elasticrun.lint.walk.core import Frame

_numbers = itertools.count(1)


class Expressions(Attributes):
    """Evaluates expressions."""

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Value:
        """Return what an expression may be, noting its reads and effects."""
        if node is None:
            return constant(None)
        method: Callable[[ast.expr, Frame], Value] | None = getattr(
            self, "_eval_" + type(node).__name__, None
        )
        if method is not None:
            return method(node, frame)
        return self._eval_others(node, frame)

    def _eval_others(self, node: ast.expr, frame: Frame) -> Value:
        children = [
            self.evaluate(child, frame)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.expr)
        ]
        return unknown(taints=self.taints_of(children))

    def _eval_Constant(self, node: ast.Constant, _: Frame) -> Value:
        return constant(node.value)

    def _eval_Name(self, node: ast.Name, frame: Frame) -> Value:
        value, owner = self.look_up(node.id, frame)
        if owner is not None and value.kind not in ("func", "class", "module", "ext"):
            self.read((owner.uid, node.id), node)
            if value.kind in ("list", "dict", "set") or value.is_durable:
                self.read((value.uid, "[]"), node)
        if value.kind == "unknown" and roles.hint(node.id) == "rank":
            value.taints |= {"rank"}
        return value

    # Operators.

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame) -> Value:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        if left.kind == "list" and right.kind == "list":
            return Value("list", parts=[*left.parts, *right.parts])
        if left.kind == "list" and isinstance(node.op, ast.Mult):
            repeated = Value("list", parts=left.parts)
            repeated.is_complete = False
            return self.made(repeated)
        taints = left.taints | right.taints
        if isinstance(node.op, ast.Mod) and "epoch" not in left.taints:
            taints |= {"modulo"}
        return unknown(taints=taints)

    def _eval_Compare(self, node: ast.Compare, frame: Frame) -> Value:
        values = [self.evaluate(each, frame) for each in (node.left, *node.comparators)]
        return unknown(taints=self.taints_of(values))

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame) -> Value:
        with self.into(TEST if self.sink.kind != "log" else self.sink):
            test = self.evaluate(node.test, frame)
        truth = self.truth(node.test, frame)
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse, frame)
        number = next(_numbers)
        with self.guarded(node.test, True, test.taints, number, frame):
            first = self.evaluate(node.body, frame)
        with self.guarded(node.test, False, test.taints, number, frame):
            second = self.evaluate(node.orelse, frame)
        value = join(first, second)
        if value.kind in ("unknown", "const"):
            value = unknown(value.name, first.taints | second.taints)
        return value

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame) -> Value:
        values = [self.evaluate(each, frame) for each in node.values]
        objects = [each for each in values if each.is_object]
        return objects[0] if objects else unknown(taints=self.taints_of(values))

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame) -> Value:
        value = Value("func", "lambda", node=node)
        value.frame, value.data = frame, frame.module
        return value

    def _eval_Call(self, node: ast.Call, frame: Frame) -> Value:
        return self.call(node, frame)

    def _eval_Starred(self, node: ast.Starred, frame: Frame) -> Value:
        return self.evaluate(node.value, frame)

    def _eval_Await(self, node: ast.Await, frame: Frame) -> Value:
        return self.evaluate(node.value, frame)

    def _eval_Yield(self, node: ast.Yield, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        if frame.yields is not None:
            self.current = self.step(node, frame)
            frame.yields(value)
            self.step(node, frame)
        return unknown()

    def _eval_YieldFrom(self, node: ast.YieldFrom, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        if frame.yields is not None:
            self.iterate(value, node, frame, frame.yields)
        return unknown()

    # Displays.

    def _eval_List(self, node: ast.List, frame: Frame) -> Value:
        return self._sequence("list", node.elts, frame)

    def _eval_Tuple(self, node: ast.Tuple, frame: Frame) -> Value:
        return self._sequence("tuple", node.elts, frame)

    def _eval_Set(self, node: ast.Set, frame: Frame) -> Value:
        return self._sequence("set", node.elts, frame)

    def _sequence(self, kind: str, elements: list[ast.expr], frame: Frame) -> Value:
        parts: list[Value] = []
        is_complete = True
        for element in elements:
            value = self.evaluate(element, frame)
            if isinstance(element, ast.Starred):
                parts += value.parts
                is_complete &= value.kind in ("list", "tuple") and value.is_complete
            else:
                parts.append(value)
        data = None if elements else EMPTY
        made = Value(kind, parts=parts, taints=self.taints_of(parts), data=data)
        made.is_complete = is_complete
        return self.made(made)

    def _eval_Dict(self, node: ast.Dict, frame: Frame) -> Value:
        made = self.made(Value("dict", data=None if node.keys else EMPTY))
        for key, element in zip(node.keys, node.values, strict=True):
            value = self.evaluate(element, frame)
            made.taints |= value.taints
            name = self.evaluate(key, frame) if key is not None else None
            if name is None:
                made.attrs.update(value.attrs)
            elif name.kind == "const" and is_key(name.data):
                made.attrs[name.data] = value
            else:
                made.parts.append(value)
                made.is_complete = False
        return made

    # Comprehensions.

    def _eval_ListComp(self, node: ast.ListComp, frame: Frame) -> Value:
        return self._comprehension("list", node.generators, [node.elt], node, frame)

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame) -> Value:
        return self._comprehension("set", node.generators, [node.elt], node, frame)

    def _eval_GeneratorExp(self, node: ast.GeneratorExp, frame: Frame) -> Value:
        return self._comprehension("list", node.generators, [node.elt], node, frame)

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame) -> Value:
        elements = [node.key, node.value]
        return self._comprehension("dict", node.generators, elements, node, frame)

    def _comprehension(
        self,
        kind: str,
        generators: list[ast.comprehension],
        elements: list[ast.expr],
        node: ast.expr,
        frame: Frame,
    ) -> Value:
        result = Value(kind)
        before = dict(frame.env)
        fixed = set(frame.fixed)

        def level(depth: int) -> None:
            if depth == len(generators):
                values = [self.evaluate(each, frame) for each in elements]
                result.taints |= self.taints_of(values)
                key = values[0]
                if kind != "dict":
                    result.parts.append(values[0])
                elif key.kind == "const" and is_key(key.data):
                    result.attrs[key.data] = values[1]
                else:
                    result.parts.append(values[1])
                return
            generator = generators[depth]

            def body(element: Value) -> None:
                self.assign(generator.target, element, frame, how="target")
                self.step(node, frame)
                for test in generator.ifs:
                    self.evaluate(test, frame)
                level(depth + 1)

            value = self.evaluate_iterable(generator.iter, frame)
            self.iterate(value, node, frame, body)

        level(0)
        frame.env, frame.fixed = before, fixed
        result.is_complete = kind != "dict" or not result.parts
        return self.made(result)

    def evaluate_iterable(self, node: ast.expr, frame: Frame) -> Value:
        """Return what is iterated: a call there makes an iterable, nothing else."""
        if isinstance(node, ast.Call):
            return self.call(node, frame, is_iterated=True)
        return self.evaluate(node, frame)


def next_number() -> int:
    """Return a number for a new `if`."""
    return next(_numbers)
