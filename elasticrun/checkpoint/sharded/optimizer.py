"""Optimizers of sharded parameters, saved by parameter names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, empty
from torch.optim import Optimizer

from elasticrun.checkpoint.sharded.layout import TensorSource, fill
from elasticrun.checkpoint.sharded.module import ShardedState
from elasticrun.checkpoint.states.nested import map_paths
from elasticrun.checkpoint.states.optimizer import (
    check_entries,
    check_kind,
    modules_among,
)
from elasticrun.checkpoint.states.parameter_names import (
    by_names,
    by_numbers,
    find_names,
    has_names,
    in_groups,
)
from elasticrun.checkpoint.states.shards import SavedState, ShardReader
from elasticrun.checkpoint.states.state import BaseState


class ShardedOptimizerState(ShardedState):
    """An optimizer of parameters that are DTensors.

    Saved under the names that these have in registered modules.
    """

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._optimizer = target
        self._modules: list[tuple[str, nn.Module]] = []
        self._parameters: dict[str, Tensor] = {}

    def note_states(self, states: Iterable[BaseState]) -> None:
        self._modules = modules_among(states)
        self._find_names()

    def _find_names(self) -> None:
        self._parameters = find_names(self.name, self._optimizer, self._modules)

    def current_values(self) -> Any:
        self._find_names()  # `add_param_group` may have been called since.
        return by_names(self._optimizer.state_dict(), list(self._parameters))

    def set_saved(self, saved: SavedState, reader: ShardReader) -> None:
        self._find_names()
        check_kind(self.name, self._optimizer, saved.values)
        if not has_names(saved.values):  # It was saved by a program without shards.
            saved = SavedState(by_names(saved.values, list(self._parameters)), {})
        targets: dict[str, Tensor] = {}
        sources: dict[str, TensorSource] = {}

        def place(path: str, leaf: Any) -> Any:
            source = saved.tensors.get(path, leaf)
            parameter = self._parameter_of(path)
            if (
                isinstance(source, TensorSource)
                and isinstance(parameter, DTensor)
                and parameter.shape == source.shape != ()
            ):
                targets[path] = torch.empty_like(parameter, dtype=source.dtype)
            elif path in saved.tensors:
                targets[path] = _replicated(saved.tensors[path], parameter)
            else:
                return leaf
            sources[path] = source
            return targets[path]

        values = map_paths(saved.values, place)
        fill(targets, sources, reader)
        values = by_numbers(values, in_groups(self._parameters, self._optimizer))
        check_entries(self.name, self._optimizer, values, list(self._parameters))
        self.set_values(values)

    def _parameter_of(self, path: str) -> Tensor | None:
        """Return the parameter that `state.model.0.weight.exp_avg`, say, is of."""
        parts = path.split(".")
        if parts[0] != "state":
            return None
        names = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
        return next((self._parameters[n] for n in names if n in self._parameters), None)


def _replicated(source: TensorSource, parameter: Tensor | None) -> Tensor:
    """Return a tensor that is whole on every replica, for one unlike its parameter."""
    if not isinstance(parameter, DTensor):
        return torch.empty(source.shape, dtype=source.dtype)
    return empty(source.shape, dtype=source.dtype, device_mesh=parameter.device_mesh)
