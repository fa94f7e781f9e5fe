"""Expressions: what they may be, and which places they read."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable

from elasticrun.lint import catalog
from elasticrun.lint.graph import Sink
from elasticrun.lint.values import (
    NO_TAINTS,
    Class,
    Value,
    constant,
    external,
    join,
    unknown,
)
from elasticrun.lint.walk.core import TEST, Core, Frame

_numbers = itertools.count(1)
_SAME_OBJECT = frozenset(("module", "data", "_orig_mod", "T"))
_RANK_ATTRIBUTES = frozenset(
    ("rank", "local_rank", "global_rank", "is_main_process", "process_index",
     "is_local_main_process", "is_world_master", "is_master", "replica_rank")
)  # fmt: skip
_WORLD_ATTRIBUTES = frozenset(("world_size", "num_processes", "num_replicas"))


class Expressions(Core):
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

    def _eval_Constant(self, node: ast.Constant, frame: Frame) -> Value:  # noqa: N802
        return constant(node.value)

    def _eval_Name(self, node: ast.Name, frame: Frame) -> Value:  # noqa: N802
        value, owner = self.look_up(node.id, frame)
        if owner is not None and value.kind not in ("func", "class", "module", "ext"):
            self.read((owner.uid, node.id), node)
            if value.kind in ("list", "dict", "set") or value.is_durable:
                self.read((value.uid, "[]"), node)
        if value.kind == "unknown" and catalog.hint(node.id) == "rank":
            value.taints |= {"rank"}
        return value

    # Attributes.

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame) -> Value:  # noqa: N802
        base = self.evaluate(node.value, frame)
        return self.attribute(base, node.attr, node, frame)

    def attribute(self, base: Value, name: str, node: ast.AST, frame: Frame) -> Value:
        """Return `base.name`."""
        if base.kind == "ext":
            return self._external_attribute(base, name)
        if base.kind == "module":
            found = base.data.env.get(name) if base.data is not None else None
            return found or unknown(name)
        if base.kind == "super":
            return self._super_attribute(base, name)
        if name in base.attrs:
            value = base.attrs[name]
            self.read((base.uid, name), node)
            if value.kind in ("list", "dict", "set"):
                self.read((value.uid, "[]"), node)
                value.registered |= base.is_durable
            return value
        if base.cls is not None:
            member = self._member(base, base.cls, name, node, frame)
            if member is not None:
                return member
        return self._other_attribute(base, name, node)

    def _external_attribute(self, base: Value, name: str) -> Value:
        value = external(f"{base.name}.{name}")
        if name in _RANK_ATTRIBUTES:
            value.taints = frozenset(("rank",))
        return value

    def _super_attribute(self, base: Value, name: str) -> Value:
        for each in base.data.lineage()[1:]:
            if name in each.methods:
                return self._method(base.owner, each, each.methods[name])
        bound = Value("bound", name)
        bound.owner = Value("opaque", "super")
        return bound

    def _member(
        self, base: Value, cls: Class, name: str, node: ast.AST, frame: Frame
    ) -> Value | None:
        found = cls.find(name)
        if found is not None:
            definer, function = found
            assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            method = self._method(base, definer, function)
            if _is_property(function) and base.kind == "instance":
                return self.call_function(method, [], {}, node, frame)
            return method
        for each in cls.lineage():
            if name in each.constants:
                value = self.evaluate(each.constants[name], each.frame)
                base.attrs[name] = value
                self.read((base.uid, name), node)
                return value
        return None

    def _method(
        self,
        owner: Value | None,
        cls: Class,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
    ) -> Value:
        method = Value("func", function.name, node=function)
        method.frame = cls.frame
        method.data = cls.module
        method.cls = cls
        names = {_decorator_name(each) for each in function.decorator_list}
        if "staticmethod" not in names and owner is not None:
            method.owner = owner
        return method

    def _other_attribute(self, base: Value, name: str, node: ast.AST) -> Value:
        if name in _SAME_OBJECT and base.kind in ("model", "param", "instance"):
            return base
        if name == "param_groups" and base.kind in ("optimizer", "unknown"):
            groups = Value("param_groups", base.name, sure=base.sure)
            groups.owner = base
            return groups
        if base.kind in ("model", "ema") or _is_role(base, "model"):
            return self._part_of_model(base, name)
        child = unknown(f"{base.name}.{name}" if base.name else name, base.taints)
        if base.kind in ("loader", "plain_loader"):
            child.taints -= {"enumerated"}
        if name in _RANK_ATTRIBUTES:
            child.taints |= {"rank"}
        if name in _WORLD_ATTRIBUTES and base.kind != "loader":
            child.taints |= {"world_size"}
        if base.kind in ("unknown", "instance", "variables"):
            base.attrs[name] = child
            self.read((base.uid, name), node)
        return child

    def _part_of_model(self, base: Value, name: str) -> Value:
        part = Value("param", name, sure=base.sure)
        part.owner = base
        return part

    # Subscripts.

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame) -> Value:  # noqa: N802
        base = self.evaluate(node.value, frame)
        key = self.evaluate(node.slice, frame)
        if base.name == catalog.ENVIRONMENT:
            return unknown("environ", _environment_taints(key))
        return self.item(base, key, node)

    def item(self, base: Value, key: Value, node: ast.AST) -> Value:
        """Return `base[key]`."""
        if base.kind == "param_groups":
            group = Value("group", base.name, sure=base.sure)
            group.owner = base.owner
            return group
        if base.kind in ("model", "param"):
            return base
        if key.kind == "const" and _is_key(key.data):
            return self._constant_item(base, key.data, node)
        taints = base.taints | key.taints
        candidates = [*base.attrs.values(), *base.parts]
        if base.kind in ("dict", "list", "tuple") and candidates:
            self.read((base.uid, "[]"), node)
            objects = [each for each in candidates if each.is_object]
            return objects[0] if objects else unknown(taints=taints)
        return unknown(taints=taints)

    def _constant_item(self, base: Value, key: object, node: ast.AST) -> Value:
        if base.kind in ("tuple", "list") and isinstance(key, int):
            if -len(base.parts) <= key < len(base.parts):
                return base.parts[key]
            return unknown(taints=base.taints)
        if key not in base.attrs and base.kind in ("dict", "unknown", "variables"):
            base.attrs[key] = unknown(str(key), base.taints)
        if key in base.attrs:
            self.read((base.uid, key), node)
            value = base.attrs[key]
            if value.owner is None and value.kind in ("list", "dict", "set", "unknown"):
                value.owner = base
            value.registered |= base.is_durable and value.kind in (
                "list",
                "dict",
                "set",
            )
            return value
        return unknown(taints=base.taints)

    # Operators.

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame) -> Value:  # noqa: N802
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        if left.kind == "list" and right.kind == "list":
            return Value("list", parts=[*left.parts, *right.parts])
        return unknown(taints=left.taints | right.taints)

    def _eval_Compare(self, node: ast.Compare, frame: Frame) -> Value:  # noqa: N802
        values = [self.evaluate(each, frame) for each in (node.left, *node.comparators)]
        return unknown(taints=self.taints_of(values))

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame) -> Value:  # noqa: N802
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

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame) -> Value:  # noqa: N802
        values = [self.evaluate(each, frame) for each in node.values]
        objects = [each for each in values if each.is_object]
        return objects[0] if objects else unknown(taints=self.taints_of(values))

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Value:  # noqa: N802
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame) -> Value:  # noqa: N802
        value = Value("func", "lambda", node=node)
        value.frame, value.data = frame, frame.module
        return value

    def _eval_Call(self, node: ast.Call, frame: Frame) -> Value:  # noqa: N802
        return self.call(node, frame)

    def _eval_Starred(self, node: ast.Starred, frame: Frame) -> Value:  # noqa: N802
        return self.evaluate(node.value, frame)

    def _eval_Await(self, node: ast.Await, frame: Frame) -> Value:  # noqa: N802
        return self.evaluate(node.value, frame)

    def _eval_Yield(self, node: ast.Yield, frame: Frame) -> Value:  # noqa: N802
        value = self.evaluate(node.value, frame)
        if frame.yields is not None:
            self.current = self.step(node, frame)
            frame.yields(value)
            self.step(node, frame)
        return unknown()

    def _eval_YieldFrom(self, node: ast.YieldFrom, frame: Frame) -> Value:  # noqa: N802
        value = self.evaluate(node.value, frame)
        if frame.yields is not None:
            self.iterate(value, node, frame, frame.yields)
        return unknown()

    # Displays.

    def _eval_List(self, node: ast.List, frame: Frame) -> Value:  # noqa: N802
        return self._sequence("list", node.elts, frame)

    def _eval_Tuple(self, node: ast.Tuple, frame: Frame) -> Value:  # noqa: N802
        return self._sequence("tuple", node.elts, frame)

    def _eval_Set(self, node: ast.Set, frame: Frame) -> Value:  # noqa: N802
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
        made = Value(kind, parts=parts, taints=self.taints_of(parts))
        made.is_complete = is_complete
        return self.made(made)

    def _eval_Dict(self, node: ast.Dict, frame: Frame) -> Value:  # noqa: N802
        made = self.made(Value("dict"))
        for key, element in zip(node.keys, node.values, strict=True):
            value = self.evaluate(element, frame)
            made.taints |= value.taints
            name = self.evaluate(key, frame) if key is not None else None
            if name is None:
                made.attrs.update(value.attrs)
            elif name.kind == "const" and _is_key(name.data):
                made.attrs[name.data] = value
            else:
                made.parts.append(value)
                made.is_complete = False
        return made

    # Comprehensions.

    def _eval_ListComp(self, node: ast.ListComp, frame: Frame) -> Value:  # noqa: N802
        return self._comprehension("list", node.generators, [node.elt], node, frame)

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame) -> Value:  # noqa: N802
        return self._comprehension("set", node.generators, [node.elt], node, frame)

    def _eval_GeneratorExp(self, node: ast.GeneratorExp, frame: Frame) -> Value:  # noqa: N802
        return self._comprehension("list", node.generators, [node.elt], node, frame)

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame) -> Value:  # noqa: N802
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
                elif key.kind == "const" and _is_key(key.data):
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

    # Tests.

    def truth(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return whether a test holds whenever it is reached here, or None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand, frame)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            return self._truth_of_all(test, frame)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._truth_of_comparison(test, frame)
        if isinstance(test, ast.Constant) and not isinstance(test.value, bool | int):
            return None
        value = self.fixed_value(test, frame)
        if value is None:
            return None
        if value.kind == "const":
            return bool(value.data)
        return True if value.is_object and value.kind not in ("list", "dict") else None

    def _truth_of_all(self, test: ast.BoolOp, frame: Frame) -> bool | None:
        truths = [self.truth(each, frame) for each in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in truths:
            return decisive
        return None if None in truths else not decisive

    def _truth_of_comparison(self, test: ast.Compare, frame: Frame) -> bool | None:
        left = self.fixed_value(test.left, frame)
        right = self.fixed_value(test.comparators[0], frame)
        operator = test.ops[0]
        if left is None:
            return None
        if right is None:
            return self._truth_of_membership(left, operator, test.comparators[0])
        is_none = right.kind == "const" and right.data is None
        if is_none and left.is_object:
            return isinstance(operator, ast.IsNot | ast.NotEq)
        if left.kind != "const" or right.kind != "const":
            return None
        if isinstance(operator, ast.Eq | ast.Is):
            return bool(left.data == right.data)
        if isinstance(operator, ast.NotEq | ast.IsNot):
            return bool(left.data != right.data)
        return None

    def _truth_of_membership(
        self, left: Value, operator: ast.cmpop, container: ast.expr
    ) -> bool | None:
        if left.kind != "const" or not isinstance(
            container, ast.Tuple | ast.List | ast.Set
        ):
            return None
        if not all(isinstance(each, ast.Constant) for each in container.elts):
            return None
        is_in = any(
            isinstance(each, ast.Constant) and each.value == left.data
            for each in container.elts
        )
        if isinstance(operator, ast.In):
            return is_in
        return not is_in if isinstance(operator, ast.NotIn) else None


def next_number() -> int:
    """Return a number for a new `if`."""
    return next(_numbers)


def flow_to(place: tuple[int, object]) -> Sink:
    """Return the sink of a value that is stored in a place."""
    return Sink("flow", (place,))


def _is_key(data: object) -> bool:
    return isinstance(data, str | int)


def _is_role(value: Value, role: str) -> bool:
    return value.kind == "instance" and value.cls is not None and value.cls.role == role


def _decorator_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {_decorator_name(each) for each in function.decorator_list}
    return bool(names & {"property", "cached_property"})


def _environment_taints(key: Value) -> frozenset[str]:
    if key.kind == "const" and key.data in catalog.RANK_VARIABLES:
        return frozenset(("rank",))
    if key.kind == "const" and key.data in catalog.WORLD_VARIABLES:
        return frozenset(("world_size",))
    return NO_TAINTS
