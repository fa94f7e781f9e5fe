"""Moving parameters by rounding errors, to see how far that carries."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import StatefulState, own_shard

_TIMES_PRECISION = 32  # So much that what depends on parameters is seen to move.


class Perturbation:
    """Multiplies each trained parameter by 1 + e or 1 - e, e some rounding errors.

    Another number of replicas adds gradients up in another order, which moves
    parameters less far. It draws from a generator of its own.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def apply(self, states: Iterable[BaseState]) -> None:
        """Move the parameters of every registered module once."""
        for state in states:
            target = getattr(state, "target", None)
            if isinstance(state, StatefulState) and isinstance(target, torch.nn.Module):
                for parameter in target.parameters():
                    if parameter.requires_grad and parameter.is_floating_point():
                        self._move(own_shard(parameter.data))

    def _move(self, data: torch.Tensor) -> None:
        size = _TIMES_PRECISION * torch.finfo(data.dtype).eps
        signs = torch.randint(2, data.shape, generator=self._generator)
        data.mul_((1 + (signs.to(data) * 2 - 1) * size).to(data.dtype))
