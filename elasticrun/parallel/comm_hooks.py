"""What DDP's communication hooks remember between steps, in checkpoints."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values

Tensors = dict[int, torch.Tensor]  # By the number of DDP's bucket.


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


def states_of(prefix: str, state: object, device: torch.device) -> list[BaseState]:
    """Return what keeps a hook's state in checkpoints, if it is one to keep."""
    if not isinstance(state, PowerSGDState):
        return []
    return [
        PowerSGDMemory(f"{prefix}comm_hook", state, device),
        PowerSGDErrors(f"{prefix}comm_hook.errors", state, device),
    ]


def _moved(tensors: Any, device: torch.device) -> Tensors:
    return {number: tensor.to(device) for number, tensor in tensors.items()}
