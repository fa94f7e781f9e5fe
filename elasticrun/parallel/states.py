"""What of a parallel model is in checkpoints: its module, and what its hook remembers.

Saves compare whether all replicas have the same module.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from elasticrun.checkpoint.states.metrics import MetricState
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values

_NUM_PARTS = 64  # What is sent does not grow with the number of tensors,
_NUM_ELEMENTS = 4096  # nor what is read with their size.


class ParallelState(MetricState):
    """The state of a module that all replicas train alike."""

    target: nn.Module

    def samples(self) -> Mapping[str, list[float]]:
        """Return sums over elements of the parameters, by the names of neighbours."""
        named = [*self.target.named_parameters()]
        bounds = [len(named) * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
        groups = [named[start:stop] for start, stop in pairwise(bounds) if start < stop]
        if not groups:
            return {}
        with torch.no_grad():
            sums = torch.stack([_sums([each for _, each in group]) for group in groups])
        return {
            ", ".join(name for name, _ in group): values
            for group, values in zip(groups, sums.tolist(), strict=True)
        }


class PowerSGDMemory(BaseState):
    """What all replicas have alike: the factors of the last step, and the step."""

    def __init__(self, name: str, state: PowerSGDState, device: torch.device) -> None:
        super().__init__(name)
        self._state = state
        self._device = device

    def save(self, fileobj: BinaryIO) -> None:
        """Write the factors, the number of the step and the generator."""
        state = self._state
        kind, keys, *rest = state.rng.get_state(legacy=True)
        values = {
            "iter": state.iter,
            "p": state.p_memory_dict,
            "q": state.q_memory_dict,
            "rng": [str(kind), [int(key) for key in keys], *map(float, rest)],
        }
        save_values(values, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Give them back to PowerSGD."""
        values = load_values(fileobj)
        state = self._state
        state.iter = values["iter"]
        state.p_memory_dict = _moved(values["p"], self._device)
        state.q_memory_dict = _moved(values["q"], self._device)
        kind, keys, place, has_gauss, gauss = values["rng"]
        drawn = np.asarray(keys, dtype=np.uint32)
        state.rng.set_state((kind, drawn, int(place), int(has_gauss), gauss))


class PowerSGDErrors(BaseState):
    """What a replica's gradients had that was not communicated yet.

    A replica that did not exist before has none.
    """

    is_per_replica = True

    def __init__(self, name: str, state: PowerSGDState, device: torch.device) -> None:
        super().__init__(name)
        self._state = state
        self._device = device

    def save(self, fileobj: BinaryIO) -> None:
        """Write the errors."""
        save_values({"errors": self._state.error_dict}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Give them back to PowerSGD."""
        errors = load_values(fileobj)["errors"]
        self._state.error_dict = _moved(errors, self._device)


def hook_states_of(prefix: str, state: object, device: torch.device) -> list[BaseState]:
    """Return what keeps a hook's state in checkpoints, if it is one to keep."""
    if not isinstance(state, PowerSGDState):
        return []
    return [
        PowerSGDMemory(f"{prefix}comm_hook", state, device),
        PowerSGDErrors(f"{prefix}comm_hook.errors", state, device),
    ]


def _sums(tensors: list[Tensor]) -> Tensor:
    """Return the sum of magnitudes, and the plain sum: few changes leave both alike."""
    total = torch.zeros(2, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _NUM_ELEMENTS)].double()
        total += torch.stack([some.abs().sum(), some.sum()]).to(total.device)
    return total


def _moved(tensors: Any, device: torch.device) -> dict[int, Tensor]:
    """Return tensors on a device, by the numbers of DDP's buckets."""
    return {number: tensor.to(device) for number, tensor in tensors.items()}
