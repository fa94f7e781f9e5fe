"""The state of a parallel model; each save checks that all replicas have the same."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from elasticrun.checkpoint.states.metrics import MetricState

_NUM_PARTS = 64  # What is sent does not grow with the number of tensors,
_NUM_ELEMENTS = 4096  # nor what is read with their size.


class ParallelState(MetricState):
    """The state of a module that all replicas train alike.

    Args:
        has_common: Whether its buffers are made the same on all replicas.
    """

    target: nn.Module

    def __init__(
        self,
        name: str,
        target: nn.Module,
        module: nn.Module,
        *,
        has_common: bool = True,
    ) -> None:
        super().__init__(name, target, module)
        self._has_common = has_common
        assert self._memory is not None
        self._memory.looks_at_gradients = False  # Their hooks know.

    def has_common_statistics(self) -> bool:
        return self._has_common or super().has_common_statistics()

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


def _sums(tensors: list[Tensor]) -> Tensor:
    """Return the sum of magnitudes, and the plain sum: few changes leave both alike."""
    total = torch.zeros(2, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _NUM_ELEMENTS)].double()
        total += torch.stack([some.abs().sum(), some.sum()]).to(total.device)
    return total
