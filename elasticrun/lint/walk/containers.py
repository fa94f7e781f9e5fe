"""Methods of lists, dictionaries and sets."""

from __future__ import annotations

import ast

from elasticrun.lint.catalog import GROWING
from elasticrun.lint.graph import flow_to
from elasticrun.lint.naming import written
from elasticrun.lint.values import Value, constant, unknown
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.trained import Trained

CHANGING = GROWING | frozenset(("add", "update", "setdefault", "pop", "popleft"))
EMPTYING = frozenset(("clear",))


class Containers(Trained):
    """Knows containers."""

    def _list_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name in EMPTYING:
            self.write((receiver.uid, "[]"), node, "set", None, self._text(node))
            return constant(None)
        if name not in CHANGING:
            return self._read_container(receiver, name, node, frame)
        args, _ = self.arguments(node, frame, flow_to((receiver.uid, "[]")))
        how = "grow" if name in GROWING or receiver.kind == "set" else "weak"
        is_time = bool(args) and args[-1].taints == frozenset(("time",))
        content = args[-1] if is_time else None
        self.write_content(receiver, node, how, self._text(node), content)
        if name in GROWING:
            self.note("container_grows", node, receiver, name)
            if self.loop is None and self.epoch is None and name == "append":
                receiver.parts += args
            receiver.is_complete &= self.epoch is None and self.loop is None
        return unknown(taints=receiver.taints)

    _dict_method = _set_method = _list_method

    def write_content(
        self,
        value: Value,
        node: ast.AST,
        how: str,
        text: str,
        content: Value | None = None,
    ) -> None:
        """Note a change of what a container holds, and so of what holds it."""
        self.write((value.uid, "[]"), node, how, content or value, text)
        owner, depth = value.owner, 0
        while owner is not None and depth < 4:
            self.bases[owner.uid] = owner
            value.registered |= owner.is_durable
            self.write((owner.uid, "[]"), node, how, owner, text)
            owner, depth = owner.owner, depth + 1

    def _text(self, node: ast.Call) -> str:
        assert isinstance(node.func, ast.Attribute)
        return written(node.func.value)

    def _read_container(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if receiver.kind != "dict" or name not in ("items", "values", "keys", "get"):
            return None
        args, _ = self.arguments(node, frame)
        if name == "get":
            return self.item(receiver, args[0], node) if args else None
        made = Value("list", taints=receiver.taints)
        made.is_complete = receiver.is_complete and bool(receiver.attrs)
        pairs = [(constant(k), v) for k, v in receiver.attrs.items()]
        if name == "items":
            made.parts = [Value("tuple", parts=pair) for pair in pairs]
        else:
            made.parts = [pair[name == "values"] for pair in pairs]
        return made
