"""Calls of elasticrun itself, and loops over its loaders that cannot be seen."""

from __future__ import annotations

import ast

from elasticrun.lint import catalog, roles
from elasticrun.lint.graph import SAVE, VALUE, DataLoop
from elasticrun.lint.naming import written
from elasticrun.lint.values import (
    NO_TAINTS,
    Value,
    constant,
    register,
    register_reachable,
    unknown,
)
from elasticrun.lint.walk.called import Arguments
from elasticrun.lint.walk.calls import Calls
from elasticrun.lint.walk.core import Frame

_ELASTIC_TAINTS = {
    "rank": frozenset(("rank",)),
    "local_rank": frozenset(("rank",)),
    "replica_rank": frozenset(("rank",)),
    "world_size": frozenset(("world_size",)),
    "num_replicas": frozenset(("world_size",)),
    "generation": frozenset(("generation",)),
    "num_restarts": frozenset(("generation",)),
    "once": frozenset(("once",)),
    "current_epoch": frozenset(("epoch",)),
    "finished_epochs": frozenset(("epoch",)),
}


class Elastic(Calls):
    """Knows what elasticrun's own names make."""

    def call_elastic(
        self, name: str, node: ast.Call, frame: Frame, given: Arguments | None
    ) -> Value:
        """Return what one of elasticrun's own names makes or asks."""
        sink = SAVE if name == "Variables" else VALUE
        args, keywords = given or self.arguments(node, frame, sink)
        if name in roles.LOADERS:
            return self._make_loader(name, node, args, keywords)
        if name == "AdaptiveDataParallel":
            return self._make_parallel(node, args, keywords)
        if name == "remaining_epochs_until":
            value = Value("epochs", name, node=node)
            value.parts = args[:1] or list(keywords.values())[:1]
            return value
        if name == "register":
            for value in [*args, *keywords.values()]:
                register(value)
                if value.kind == "instance":
                    register_reachable(value)
            self.note("state_made", node, data="register")
            self._note_unseen(node, frame)
            return constant(None)
        if name == "Variables":
            return self._make_variables(node, keywords)
        if name == "Accumulator":
            self.note("state_made", node, data=name)
            return self.made(Value("accumulator", name, node=node))
        if name in catalog.ELASTIC_COLLECTIVES:
            self.note("collective", node, data=name)
            return unknown()
        return unknown(name, _ELASTIC_TAINTS.get(name, NO_TAINTS))

    def _note_unseen(self, node: ast.Call, frame: Frame) -> None:
        """Note that something is registered of which not even the number is known."""
        for keyword in node.keywords:
            if keyword.arg is None:
                value = self.evaluate(keyword.value, frame)
                if not value.attrs and not value.parts:
                    self.note("unseen_states", node)

    def _make_loader(
        self, name: str, node: ast.Call, args: list[Value], keywords: dict[str, Value]
    ) -> Value:
        value = self.made(Value("loader", name, node=node))
        value.parts = args if name == "CombinedLoader" else args[:1]
        value.data = (args, keywords)
        self.note("state_made", node, value, name)
        self.note("loader_made", node, value, (args, keywords))
        return value

    def _make_parallel(
        self, node: ast.Call, args: list[Value], keywords: dict[str, Value]
    ) -> Value:
        value = self.made(Value("model", "AdaptiveDataParallel", node=node))
        names = ("module", "model", "optimizer", "lr_scheduler")
        states = [*args, *(v for k, v in keywords.items() if k in names)]
        value.parts = [each for each in states if each.kind != "const"]
        for part in states:
            register(part)
        register(value)
        self.note("state_made", node, value, "AdaptiveDataParallel")
        return value

    def _make_variables(self, node: ast.Call, keywords: dict[str, Value]) -> Value:
        value = self.made(Value("variables", "Variables", node=node))
        value.attrs = {k: v for k, v in keywords.items() if k != "name"}
        for each in value.attrs.values():
            each.registered = each.kind in ("list", "dict", "set")
        self.note("state_made", node, value, "Variables")
        return value

    # Loops that cannot be seen.

    def assume_loop(
        self, loader: Value, node: ast.AST, frame: Frame, *, sure: bool
    ) -> None:
        """Note a loop over a loader inside a function that cannot be seen."""
        found = self.loaders_in(loader)
        if not found:
            return
        loop = DataLoop(node, frame.module, written(node)[:60], found[0])
        loop.sure = sure and found[0].sure
        loop.is_elastic = found[0].kind == "loader"
        loop.call, loop.epoch, loop.outer = frame.call, self.epoch, self.loop
        step = self.step(node, frame)
        step.head_of, loop.head = loop, step.number
        self.loops.append(loop)
        self.step(frame.statement, frame)

    def loaders_in(self, value: Value, depth: int = 3) -> list[Value]:
        """Return the loaders that iterating a value iterates."""
        if value.kind in ("loader", "plain_loader"):
            return [value]
        if value.kind not in ("wrapped", "iterator") or depth == 0:
            return []
        return [
            each for part in value.parts for each in self.loaders_in(part, depth - 1)
        ]
