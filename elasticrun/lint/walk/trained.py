"""Methods of what is trained, and of what trains it."""

from __future__ import annotations

import ast

from elasticrun.lint.graph import OPTIMIZER, VALUE
from elasticrun.lint.values import Value, constant
from elasticrun.lint.walk.core import Frame
from elasticrun.lint.walk.externals import Externals

_CHAINING = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "double",
        "bfloat16",
        "train",
        "eval",
        "requires_grad_",
        "detach",
        "contiguous",
        "share_memory",
        "compile",
        "type",
        "channels_last",
        "apply",
    ]
)
_PARAMETERS = frozenset(
    [
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "state_dict",
        "values",
        "items",
        "children",
        "modules",
        "named_modules",
        "keys",
    ]
)
_HARMLESS_IN_PLACE = frozenset(
    [
        "requires_grad_",
        "copy_",
        "detach_",
        "zero_grad",
        "retain_grad",
        "share_memory_",
        "register_",
    ]
)
_EMA_UPDATES = frozenset(("update", "update_parameters", "step", "update_average"))


class Trained(Externals):
    """Knows models, optimizers, schedulers, scalers and averages."""

    def _scheduler_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name not in ("step", "step_update"):
            return None
        args, keywords = self.arguments(node, frame, OPTIMIZER)
        values = [*args, *keywords.values()]
        self.note(
            "scheduler_step", node, receiver, (self.taints_of(values), len(values))
        )
        return constant(None)

    def _optimizer_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name != "step":
            return None
        self.arguments(node, frame, OPTIMIZER)
        self.note("optimizer_step", node, receiver)
        return constant(None)

    def _scaler_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        args, _ = self.arguments(node, frame, VALUE)
        if name == "step":
            self.note("optimizer_step", node, args[0] if args else receiver)
        elif name == "update":
            self.note("scaler_update", node, receiver)
        elif name == "scale" and args:
            return args[0]
        return constant(None)

    def _ema_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name in _EMA_UPDATES:
            self.arguments(node, frame, OPTIMIZER)
            self.note("ema_update", node, receiver)
            return constant(None)
        return self._model_method(receiver, name, node, frame)

    def _loaded(self, receiver: Value, node: ast.Call, frame: Frame) -> Value:
        self.arguments(node, frame, OPTIMIZER)
        for each in (receiver, *receiver.parts, *receiver.also):
            each.loaded_by_hand = True
        self.note("loaded", node, receiver)
        return constant(None)

    def _model_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name == "load_state_dict":
            return self._loaded(receiver, node, frame)
        if name in ("apply", "reset_parameters", "init_weights"):
            self.arguments(node, frame)
            self.note("weights", node, receiver, name)
            return receiver
        if name in _CHAINING:
            self.arguments(node, frame)
            return receiver
        if name in _PARAMETERS:
            part = Value("param", name, sure=receiver.sure)
            part.owner = receiver
            return part
        return None

    def _param_method(
        self, receiver: Value, name: str, node: ast.Call, frame: Frame
    ) -> Value | None:
        if name in ("apply", "reset_parameters"):
            return self._model_method(receiver.owner or receiver, name, node, frame)
        self.arguments(node, frame, OPTIMIZER)
        if name == "backward":
            self.note("backward", node)
        is_in_place = name.endswith("_") and not name.startswith("_")
        if is_in_place and name not in _HARMLESS_IN_PLACE:
            self.note("weights", node, receiver.owner or receiver, name)
        return receiver
