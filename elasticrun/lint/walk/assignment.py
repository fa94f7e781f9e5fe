"""Assignments: what a name, attribute or item becomes, and what that changes."""

from __future__ import annotations

import ast

from elasticrun.lint.graph import OPTIMIZER, OWN, SAVE, VALUE, Place, Sink
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, is_key, unknown
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.iteration import Iteration, element_of

_HANDED = frozenset(("model", "optimizer", "scheduler", "loader", "ema", "instance"))
_BOUNDING = frozenset(("max", "min", "maximum", "minimum", "fmax", "fmin"))


class Assignment(Iteration):
    """Assigns."""

    def assign(
        self, target: ast.expr, value: Value, frame: Frame, *, how: str = "set"
    ) -> None:
        """Bind a target, noting the place that is written."""
        if isinstance(target, ast.Name):
            self._assign_name(target, value, frame, how)
        elif isinstance(target, ast.Attribute):
            base = self._evaluate_base(target.value, frame)
            self._assign_member(base, target.attr, target, value, how)
        elif isinstance(target, ast.Subscript):
            base = self._evaluate_base(target.value, frame)
            key = self.evaluate(target.slice, frame)
            is_known = key.kind == "const" and is_key(key.data)
            name = key.data if is_known else "[]"
            how = how if is_known or how != "set" else "weak"
            self._assign_member(base, name, target, value, how)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, frame, how)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, unknown(taints=value.taints), frame, how=how)

    def _evaluate_base(self, node: ast.expr, frame: Frame) -> Value:
        with self.into(OWN):
            return self.evaluate(node, frame)

    def _assign_name(
        self, target: ast.Name, value: Value, frame: Frame, how: str
    ) -> None:
        name = target.id
        owner = frame
        if name in frame.globals:
            owner = self.module_frame(frame)
        elif name in frame.nonlocals:
            owner = self.owner(name, frame) or frame
        if not value.name and value.kind == "unknown":
            value.name = name
        self._drop_content(owner.env.get(name), value, target, name)
        owner.env[name] = value
        owner.fixed.discard(name)
        if how == "target" and value.kind in ("const",):
            owner.fixed.add(name)
        self.write((owner.uid, name), target, how, value, name)

    def _assign_member(
        self, base: Value, name: object, target: ast.expr, value: Value, how: str
    ) -> None:
        before = base.attrs.get(name)
        self.bases[base.uid] = base
        is_news = value.kind not in ("const", "unknown") or before is None
        if is_news or not before or before.kind in ("const", "unknown"):
            self._drop_content(before, value, target, str(name))
            base.attrs[name] = value
        if not value.name and value.kind == "unknown":
            value.name = str(name)
        if base.kind == "class":
            self.write((base.uid, name), target, how, value, written(target))
            return
        text = written(target)
        self.write((base.uid, name), target, how, value, text)
        if isinstance(target, ast.Subscript) and name != "[]":
            self.write((base.uid, "[]"), target, "weak", value, text)

    def _drop_content(
        self, before: Value | None, value: Value, target: ast.expr, name: str
    ) -> None:
        """Note that a name no longer leads to what its old container held."""
        if before is None or before.kind not in ("list", "dict", "set"):
            return
        if value is not before and value.kind == before.kind:
            self.write((before.uid, "[]"), target, "set", None, name)

    def _unpack(
        self, target: ast.Tuple | ast.List, value: Value, frame: Frame, how: str
    ) -> None:
        parts = value.parts if value.kind in ("tuple", "list") else []
        is_exact = len(parts) == len(target.elts) and not any(
            isinstance(each, ast.Starred) for each in target.elts
        )
        for index, each in enumerate(target.elts):
            if is_exact:
                part = parts[index]
            elif index == 0 and value.kind in ("scheduler", "optimizer", "model"):
                part = value  # a factory that returns something beside it
            elif value.kind in ("param", "param_groups"):
                part = element_of(value)
            else:
                part = unknown(taints=value.taints)
            self.assign(each, part, frame, how=how)

    # Statements.

    def _run_Assign(self, node: ast.Assign, frame: Frame) -> None:
        self.step(node, frame)
        start = len(self.read_log)
        with self.into(self.sink_of(node.targets, frame)):
            value = self.evaluate(node.value, frame)
        value = self._handed_through(node, value, frame)
        if value.kind == "unknown" and isinstance(node.value, ast.Call):
            value.node, value.frame = value.node or node.value, self.current
        reads = {read.place for read in self.read_log[start:]}
        for target in node.targets:
            self.assign(target, value, frame, how=self._how(target, node.value))
            self._note_durable(target, node, frame, reads, value)

    def _handed_through(self, node: ast.Assign, value: Value, frame: Frame) -> Value:
        """Return what `x = f(x)` and `x, y = f(x, y)` leave in x where f is unseen."""
        call, target = node.value, node.targets[0]
        if value.kind != "unknown" or not isinstance(call, ast.Call):
            return value
        given = {
            each.id: self.look_up(each.id, frame)[0]
            for each in call.args
            if isinstance(each, ast.Name)
        }
        given = {name: each for name, each in given.items() if each.kind in _HANDED}
        if isinstance(target, ast.Name):
            return given.get(target.id, value)
        if not given or not isinstance(target, ast.Tuple):
            return value
        names = [each.id if isinstance(each, ast.Name) else "" for each in target.elts]
        if not given.keys() & set(names):
            return value
        parts = [given.get(name) or unknown(name, value.taints) for name in names]
        return Value("tuple", parts=parts)

    def _run_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.step(node, frame)
            with self.into(self.sink_of([node.target], frame)):
                value = self.evaluate(node.value, frame)
            self.assign(node.target, value, frame)

    def _how(self, target: ast.expr, value: ast.expr) -> str:
        """Return `update` where the new value is made from the old one."""
        if isinstance(value, ast.Constant | ast.Name):
            return "set"
        how = self.ways.get((target, value))
        if how is None:
            is_own = any(is_same(each, target) for each in ast.walk(value))
            how = self.ways[target, value] = "update" if is_own else "set"
        return how

    def sink_of(self, targets: list[ast.expr], frame: Frame) -> Sink:
        """Return where an assigned value goes, so that its use can be followed."""
        places: list[Place] = []
        for target in targets:
            found = self._places(target, frame)
            if found is None:
                return SAVE
            if found == [(0, "optimizer")]:
                return OPTIMIZER
            places += found
        return Sink("flow", tuple(places))

    def _places(self, target: ast.expr, frame: Frame) -> list[Place] | None:
        if isinstance(target, ast.Name):
            owner = (
                frame
                if target.id not in frame.globals | frame.nonlocals
                else (self.owner(target.id, frame) or self.module_frame(frame))
            )
            return [(owner.uid, target.id)]
        if isinstance(target, ast.Tuple | ast.List):
            places: list[Place] = []
            for each in target.elts:
                found = self._places(each, frame)
                if found is None:
                    return None
                places += found
            return places
        if isinstance(target, ast.Starred):
            return self._places(target.value, frame)
        if isinstance(target, ast.Attribute | ast.Subscript):
            return self._member_places(target, frame)
        return []

    def _member_places(
        self, target: ast.Attribute | ast.Subscript, frame: Frame
    ) -> list[Place] | None:
        log = len(self.read_log)
        count = len(self.current.reads)
        base = self.evaluate(target.value, frame)
        del self.read_log[log:]
        del self.current.reads[count:]
        if base.is_durable and base.kind != "model":
            return None
        if base.kind in ("group", "optimizer", "param_groups", "param", "model"):
            return [(0, "optimizer")]
        if isinstance(target, ast.Attribute):
            return [(base.uid, target.attr)]
        if isinstance(target.slice, ast.Constant):
            return [(base.uid, target.slice.value), (base.uid, "[]")]
        return [(base.uid, "[]")]

    def _run_AugAssign(self, node: ast.AugAssign, frame: Frame) -> None:
        self.step(node, frame)
        with self.into(OWN):
            old = self.evaluate(as_load(node.target), frame)
        with self.into(self.sink_of([node.target], frame)):
            value = self.evaluate(node.value, frame)
        if old.kind in ("list", "set") and isinstance(node.op, ast.Add | ast.BitOr):
            self.write_content(old, node, "grow", written(node.target))
            self.note("container_grows", node, old, "+=")
            old.is_complete = False
            return
        if old.kind == "param":
            self.note("weights", node, old.owner, "in place")
            return
        new = unknown(old.name, old.taints | value.taints)
        self.assign(node.target, new, frame, how="update")
        self._note_update(node.target, node, frame, type(node.op).__name__)

    def _note_durable(
        self,
        target: ast.expr,
        node: ast.Assign,
        frame: Frame,
        reads: set[Place],
        value: Value,
    ) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            for index, each in enumerate(target.elts):
                source = values[index] if index < len(values) else node.value
                own = ast.Assign(targets=[each], value=source)
                ast.copy_location(own, node)
                self._note_durable(each, own, frame, reads, value)
            return
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return
        if self._how(target, node.value) == "set":
            self._note_update(target, node, frame, "Set")
        elif not _is_bounding(node.value):
            self._note_update(target, node, frame, _operator(node.value))

    def _note_update(
        self, target: ast.expr, node: ast.stmt, frame: Frame, operator: str
    ) -> None:
        """Note a change of something durable, or of an optimizer's settings."""
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return
        base = self._quietly(target.value, frame)
        if base.kind == "group" or (base.kind == "optimizer" and operator != "Set"):
            self.note("setting_changed", node, base.owner or base, operator)
            return
        if base.kind == "param" and isinstance(target, ast.Attribute):
            if target.attr == "data" and operator != "Set":
                self.note("weights", node, base.owner, "in place")
            return
        if base.is_durable and base.kind not in ("model", "accumulator"):
            name = target.attr if isinstance(target, ast.Attribute) else "[]"
            if isinstance(target, ast.Subscript) and isinstance(
                target.slice, ast.Constant
            ):
                name = str(target.slice.value)
            text = written(target)
            self.note("durable_update", node, base, (operator, name, text))

    def _quietly(self, node: ast.expr, frame: Frame) -> Value:
        """Evaluate something again without noting its reads."""
        log, count = len(self.read_log), len(self.current.reads)
        with self.into(VALUE):
            value = self.evaluate(node, frame)
        del self.read_log[log:]
        del self.current.reads[count:]
        return value


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Return whether two expressions name the same thing, read or written."""
    if isinstance(one, ast.Name) and isinstance(other, ast.Name):
        return one.id == other.id
    if isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute):
        return one.attr == other.attr and is_same(one.value, other.value)
    if isinstance(one, ast.Subscript) and isinstance(other, ast.Subscript):
        return is_same(one.value, other.value) and is_same(one.slice, other.slice)
    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
        return bool(one.value == other.value)
    if isinstance(one, ast.Call) and isinstance(other, ast.Call):
        return ast.dump(one) == ast.dump(other)
    return False


def as_load(target: ast.expr) -> ast.expr:
    """Return a target of `+=` as the expression that reads it."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(id=target.id, ctx=ast.Load()), target)
    return target


def _operator(value: ast.expr) -> str:
    if isinstance(value, ast.BinOp):
        return type(value.op).__name__
    return "Other"


def _is_bounding(value: ast.expr) -> bool:
    """Return whether doing it twice gives what doing it once gives: max and min."""
    if isinstance(value, ast.IfExp):
        return True
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else ""
    if isinstance(value.func, ast.Name):
        name = value.func.id
    return name in _BOUNDING
