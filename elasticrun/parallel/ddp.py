"""What DDP leaves to circumstances: how gradients are packed, how old buffers are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP decide now how it packs gradients together, by the model alone.

    It would do so after the first backward pass. But where a gradient lies decides the
    order in which it is summed over three or more replicas, so a job that was restarted
    would differ in the last bits from one that went on.
    """
    is_sparse = any(getattr(layer, "sparse", False) for layer in ddp.module.modules())
    if ddp.find_unused_parameters or ddp.mixed_precision or is_sparse:
        return
    module = ddp.module
    parameters = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        ddp.module = _Touch(parameters)
        with torch.enable_grad():
            nothing = torch.zeros(())  # With `device_ids`, DDP wants something to move.
            ddp(nothing).backward()
            with ddp.no_sync():  # Else it would expect a backward pass.
                ddp(nothing)  # It packs anew at the start of a forward pass.
    finally:
        ddp.module = module
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def broadcast_buffers(ddp: DistributedDataParallel) -> None:
    """Give all replicas the buffers of rank 0.

    DDP does it at the beginning of each forward pass, also of those for evaluation, of
    which replicas need not have equally many.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        packed = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        dist.broadcast(packed, src=0, group=ddp.process_group)
        parts = torch.split(packed, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # Unknown to autograd, as in DDP: BatchNorm's backward pass would complain
            # of averages that it does not read.
            buffer.data.copy_(part.view_as(buffer))


class _Touch(nn.Module):
    """Returns a number that depends on each parameter, and on none by its value."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_to_touch = parameters

    def forward(self, nothing: Tensor) -> Tensor:
        del nothing
        total = torch.zeros((), device=self._parameters_to_touch[0].device)
        for parameter in self._parameters_to_touch:
            total = total + (parameter * 0).abs().sum().to(total)
        return total
