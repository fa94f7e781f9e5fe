"""Attributes and items: what hangs on a value."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.values import (
    NO_TAINTS,
    Class,
    Value,
    external,
    is_key,
    unknown,
)
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.truth import Truth

_INNER = frozenset(("module", "_orig_mod"))
_SAME_OBJECT = frozenset(("module", "data", "_orig_mod", "T"))
_RANK_ATTRIBUTES = frozenset(
    ("rank", "local_rank", "global_rank", "is_main_process", "process_index",
     "is_local_main_process", "is_world_master", "is_master", "replica_rank")
)  # fmt: skip
_WORLD_ATTRIBUTES = frozenset(("world_size", "num_processes", "num_replicas"))


class Attributes(Truth):
    """Looks up what hangs on a value."""

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame) -> Value:
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
                if value.kind in ("list", "dict", "set"):
                    value.registered |= base.is_durable
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
        is_bound = "staticmethod" not in names and owner is not None
        made = self.decorated(method, cls.frame) if cls.frame is not None else method
        if is_bound:
            made.owner = owner
        return made

    def decorated(self, function: Value, frame: Frame) -> Value:
        """Return what the project's own decorators make of a function."""
        node = function.node
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in reversed(node.decorator_list):
            if not isinstance(each, ast.Name):
                continue
            decorator = self.look_up(each.id, frame)[0]
            if decorator.kind != "func":
                continue
            wrapper = self.call_function(decorator, [function], {}, each, frame)
            if wrapper.kind == "func" and wrapper is not decorator:
                function = wrapper
        return function

    def _other_attribute(self, base: Value, name: str, node: ast.AST) -> Value:
        if name in _INNER and base.kind == "model" and base.parts:
            return base.parts[0] if base.parts[0].is_object else base
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

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        base = self.evaluate(node.value, frame)
        key = self.evaluate(node.slice, frame)
        if base.name == catalog.ENVIRONMENT:
            return unknown("environ", environment_taints(key))
        return self.item(base, key, node)

    def item(self, base: Value, key: Value, node: ast.AST) -> Value:
        """Return `base[key]`."""
        if base.kind == "param_groups":
            group = Value("group", base.name, sure=base.sure)
            group.owner = base.owner
            return group
        if base.kind in ("model", "param"):
            return base
        if key.kind == "const" and is_key(key.data):
            return self._constant_item(base, key.data, node)
        taints = base.taints | key.taints
        self.read((base.uid, "[]"), node)
        candidates = [*base.attrs.values(), *base.parts]
        if base.kind in ("dict", "list", "tuple") and candidates:
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


def environment_taints(key: Value) -> frozenset[str]:
    """Return what a variable of the environment depends on."""
    if key.kind == "const" and key.data in catalog.RANK_VARIABLES:
        return frozenset(("rank",))
    if key.kind == "const" and key.data in catalog.WORLD_VARIABLES:
        return frozenset(("world_size",))
    return NO_TAINTS
