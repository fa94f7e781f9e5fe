"""The state of a parallel model."""

from __future__ import annotations

from torch import nn

from elasticrun.checkpoint.states.metrics import MetricState


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
