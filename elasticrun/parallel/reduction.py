"""The average of gradients over replicas, by a DDP that fits what is trained now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticrun.errors import ElasticRunError
from elasticrun.parallel.ddp import settle_buckets
from elasticrun.parallel.late import LateGradients


class Reduction:
    """Keeps a DDP around a module, and finds gradients that it would leave out.

    DDP knows the parameters that required a gradient when it was made, and takes part
    in the first backward pass after a forward pass. What comes besides stays a
    replica's own, without a word, and the replicas drift apart.

    Args:
        module: With parameters to train.
        options: For `DistributedDataParallel`.

    Attributes:
        ddp: The DDP; made anew, collectively, when other parameters are trained.
        late: What notices gradients that DDP has not seen.
    """

    ddp: DistributedDataParallel

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module = module
        self._options = options
        self._parameters = list(module.parameters())
        self._trained: list[bool] = []
        self._comm_hook: tuple[Any, Any] | None = None
        self._make()
        self.late = LateGradients(self._parameters, self._refuse_late)

    @property
    def is_outdated(self) -> bool:
        """Whether other parameters are trained than when the DDP was made."""
        return self._trained != [each.requires_grad for each in self._parameters]

    @property
    def is_idle(self) -> bool:
        """Whether no parameter is trained: there is nothing to reduce."""
        return not any(each.requires_grad for each in self._parameters)

    def renew(self) -> None:
        """Make another DDP, for the parameters that are trained now. Collective."""
        # They keep what has hooks at the parameters, in whose place others come.
        del self.ddp.reducer, self.ddp.logger
        self.late.close()  # A pass that settles how gradients are packed is none.
        self._make()
        self.late.watch()

    def expect(self) -> None:
        """Note a forward pass; the first backward pass is reduced, if any is."""
        self.late.expect(is_reduced=self.ddp.require_backward_grad_sync)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook of DDP's communicate the gradients."""
        self.ddp.register_comm_hook(state, hook)
        self._comm_hook = state, hook

    def _make(self) -> None:
        ddp = self.ddp = DistributedDataParallel(self._module, **self._options)
        ddp.broadcast_buffers = False
        settle_buckets(ddp)
        if self._comm_hook is not None:
            ddp.register_comm_hook(*self._comm_hook)
        self._trained = [each.requires_grad for each in self._parameters]

    def _refuse_late(self) -> None:
        """Refuse gradients that are not reduced any more."""
        raise ElasticRunError(
            f"gradients of {type(self._module).__name__} came after those of its last "
            "forward pass had been averaged over the replicas. They would stay this "
            "replica's own, and the replicas would drift apart. They come from a "
            "second backward pass through one output (retain_graph=True), from one of "
            "an earlier forward pass, or from a loss on the parameters alone. Add the "
            "losses and call backward() once, or let each loss have its forward pass "
            "and then at once its backward pass."
        )
