"""Calls that make something: models, optimizers, schedulers, files, copies."""

from __future__ import annotations

import ast

from elasticrun.lint import roles
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, constant, unknown
from elasticrun.lint.walk.called import Called
from elasticrun.lint.walk.effects import Effects

_COPIERS = frozenset(("copy.copy", "copy.deepcopy"))
_OPENERS = frozenset(("open", "io.open", "gzip.open", "bz2.open", "codecs.open"))


class Objects(Effects):
    """Makes objects."""

    def object_made(self, it: Called) -> Value | None:
        """Return the object that a call makes; None if none is known."""
        if it.name in _OPENERS:
            path = it.args[0] if it.args else unknown()
            return self.open_file(it.node, it.args[1:], it.keywords, path)
        if it.name in _COPIERS and it.args:
            return self._copied(it.args[0], it.node)
        kind = roles.made_by(it.name)
        if not kind:
            return None
        if kind == "model_wrapper":
            models = [each for each in it.args if is_model(each)]
            return self._wrapped_model(models[0], it.node) if models else None
        value = self.made(Value(kind, it.name, node=it.node))
        value.parts = it.values
        value.data = (it.args, it.keywords)
        self.note(f"{kind}_made", it.node, value, it.name)
        return value

    def _wrapped_model(self, inner: Value, node: ast.Call) -> Value:
        value = self.made(Value("model", inner.name, node=node))
        value.parts = [inner]
        value.registered = inner.registered
        return value

    def _copied(self, original: Value, node: ast.Call) -> Value:
        copied = Value(original.kind, original.name, node=node, data=original.data)
        copied.cls, copied.parts = original.cls, list(original.parts)
        copied.attrs = dict(original.attrs)
        return self.made(copied) if original.is_object else copied

    def open_file(
        self, node: ast.Call, rest: list[Value], keywords: dict[str, Value], path: Value
    ) -> Value:
        """Return an open file, noting its path and mode."""
        mode_value = keywords.get("mode") or (rest[0] if rest else constant("r"))
        is_known = mode_value.kind == "const" and isinstance(mode_value.data, str)
        mode = mode_value.data if is_known else "?"
        value = self.made(Value("file", path.name, node=node, data=mode))
        self.note("file_opened", node, value, (path, self._path_text(node), mode))
        return value

    def _path_text(self, node: ast.Call) -> str:
        function = node.func
        if isinstance(function, ast.Attribute) and not _names_a_file(node):
            return written(function.value)
        return written(node.args[0]) if node.args else ""


def _names_a_file(node: ast.Call) -> bool:
    """Return whether `x.open(...)` is given a path, not only a mode for `x` itself."""
    first = node.args[0] if node.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return not set(first.value) <= set("rwaxbt+U")
    return first is not None


def is_model(value: Value) -> bool:
    """Return whether a value is a model, of the project or not, or named like one."""
    is_user_model = value.cls is not None and value.cls.role == "model"
    hinted = value.kind == "unknown" and roles.hint(value.name) == "model"
    return value.kind == "model" or is_user_model or hinted
