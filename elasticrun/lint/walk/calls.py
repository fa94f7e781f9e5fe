"""Calls: of the project's functions and classes, and of everything else."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog
from elasticrun.lint.graph import OWN, VALUE, Sink
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    Class,
    Value,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.called import Site
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.functions import Functions

_STEPPING = frozenset(("scheduler", "ema", "optimizer"))


class Calls(Functions):
    """Follows calls."""

    def call(self, node: ast.Call, frame: Frame, *, is_iterated: bool = False) -> Value:
        """Return what a call returns, having walked through the function if known."""
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super":
            return self._super(frame)
        if not isinstance(function, ast.Attribute):
            with self.into(VALUE):
                callee = self.evaluate(function, frame)
            return self.call_value(callee, node, frame, is_iterated=is_iterated)
        with self.into(self._sink_of_receiver(function.attr)):
            receiver = self.evaluate(function.value, frame)
        callee = self._member_called(receiver, function, frame)
        is_unseen = callee.kind == "unknown" and receiver.kind != "ext"
        if callee.kind not in ("bound", "param") and not is_unseen:
            return self.call_value(callee, node, frame, is_iterated=is_iterated)
        listed = self._as_listed(function.attr, node, frame)
        return listed or self.call_method(receiver, function.attr, node, frame)

    def _sink_of_receiver(self, name: str) -> Sink:
        """Return what a call reads its receiver for: often only to make it grow."""
        if self.sink.kind != "none":
            return self.sink
        return OWN if name in catalog.GROWING else VALUE

    def _member_called(
        self, receiver: Value, function: ast.Attribute, frame: Frame
    ) -> Value:
        """Return what hangs under a name on the receiver of a call."""
        if not _changes_by_role(receiver, function.attr):
            if receiver.kind in ("ext", "module", "instance", "super", "class"):
                return self.attribute(receiver, function.attr, function, frame)
            if function.attr in receiver.attrs:
                return receiver.attrs[function.attr]
        return Value("bound", function.attr)

    def call_value(
        self, callee: Value, node: ast.Call, frame: Frame, *, is_iterated: bool
    ) -> Value:
        """Return what calling a value returns."""
        listed = self._as_listed(callee.name, node, frame)
        if listed is not None:
            return listed
        if callee.kind == "func":
            return self._call_known(callee, node, frame)
        if callee.kind == "class":
            return self._instantiate(callee, node, frame)
        if callee.kind == "ext":
            return self.call_external(callee.name, Site(node, frame, is_iterated))
        if callee.kind == "partial":
            return self._call_partial(callee, node, frame)
        if _is_callable_instance(callee):
            method = self.attribute(callee, "__call__", node, frame)
            return self._call_known(method, node, frame)
        name = written(node.func) if callee.kind == "unknown" else callee.name
        return self.call_unknown(callee, name, Site(node, frame, is_iterated))

    def _as_listed(self, name: str, node: ast.Call, frame: Frame) -> Value | None:
        """Return what a call returns that the settings speak about; None otherwise."""
        options = self.options
        if not options.idempotent and not options.non_idempotent:
            return None
        text = written(node.func)
        names = {name, name.rpartition(".")[2], text, text.rpartition(".")[2]}
        is_effect = not names.isdisjoint(options.non_idempotent)
        if not is_effect and names.isdisjoint(options.idempotent):
            return None
        args, keywords = self.arguments(node, frame)
        if is_effect:
            self.note("outside", node, data=text)
        return unknown(taints=self.taints_of([*args, *keywords.values()]))

    def _call_known(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        callee_frame = self._frame_for(callee, node, frame)
        if callee_frame is None:
            args, keywords = self.arguments(node, frame)
            return unknown(taints=self.taints_of([*args, *keywords.values()]))
        args, keywords = self._bound_arguments(callee, callee_frame, node, frame)
        return self._enter(callee, callee_frame, args, keywords, node, frame)

    def _call_partial(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        args, keywords = self.arguments(node, frame)
        function = callee.parts[0]
        args = [*callee.parts[1:], *args]
        keywords = {**callee.attrs, **keywords}
        if function.kind == "func":
            return self.call_function(function, args, keywords, node, frame)
        if function.kind == "ext":
            site = Site(node, frame, given=(args, keywords))
            return self.call_external(function.name, site)
        return unknown(taints=self.taints_of(args))

    # The project's classes.

    def _instantiate(self, callee: Value, node: ast.Call, frame: Frame) -> Value:
        cls = callee.cls
        assert cls is not None
        if cls.role == "loader" or cls.node.name in self.options.loaders:
            return self.call_external(
                "elasticrun.AdaptiveDataLoader", Site(node, frame)
            )
        made = self.made(Value("instance", cls.node.name, node=node))
        made.cls = cls
        constructor = cls.find("__init__")
        if constructor is not None:
            method = self.attribute(made, "__init__", node, frame)
            self._call_known(method, node, frame)
        else:
            self._fill_fields(made, cls, node, frame)
        if cls.role == "state":
            self.note("state_made", node, made, cls.node.name)
            made.registered = True
            register_reachable(made)
        elif cls.role in ("scheduler", "optimizer", "ema", "scaler"):
            self.note(f"{cls.role}_made", node, made)
        return made

    def _fill_fields(
        self, made: Value, cls: Class, node: ast.Call, frame: Frame
    ) -> None:
        """Set the fields of a data class, or keep what an unseen constructor gets."""
        args, keywords = self.arguments(node, frame)
        fields = [
            statement.target.id
            for each in reversed(cls.lineage())
            for statement in each.node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
        ]
        made.attrs.update(zip(fields, args, strict=False))
        made.attrs.update(keywords)
        for name in made.attrs:
            self.write((made.uid, name), node, "set", made.attrs[name], str(name))
        if not fields:
            made.parts = [*args, *keywords.values()]

    def _super(self, frame: Frame) -> Value:
        if frame.cls is None or frame.instance is None:
            return unknown("super")
        value = Value("super", "super")
        value.owner, value.data = frame.instance, frame.cls
        return value

    # What stands below.

    def call_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value:
        raise NotImplementedError

    def call_external(self, name: str, site: Site) -> Value:
        raise NotImplementedError

    def call_unknown(self, callee: Value, name: str, site: Site) -> Value:
        raise NotImplementedError


def _is_callable_instance(value: Value) -> bool:
    cls = value.cls
    return (
        value.kind == "instance"
        and cls is not None
        and cls.role != "model"
        and cls.find("__call__") is not None
    )


def _changes_by_role(receiver: Value, name: str) -> bool:
    """Return whether the role of its class says what a method does, not its body."""
    cls = receiver.cls
    if receiver.kind != "instance" or cls is None or cls.role not in _STEPPING:
        return False
    return name in ("step", "update", "update_parameters", "load_state_dict")
