"""Averages gradients over replicas, by a DDP of the parameters being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from elasticrun.checkpoint.states.module_watch import BATCH_NORMS
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import loader_if_any
from elasticrun.job.job import Job
from elasticrun.job.loop import LoaderInLoop
from elasticrun.parallel.weighing import call_after_backward

_REQUIRES_GRAD = attrgetter("requires_grad")


class Reduction:
    """Keeps a DDP around a module, and refuses gradients that it would leave out.

    DDP knows the parameters that required a gradient when it was made, and takes part
    in the first backward pass after a forward pass. What comes besides stays a
    replica's own, without a word, and the replicas drift apart.

    Args:
        module: With parameters to train.
        options: For `DistributedDataParallel`.
        job: Counts forward passes that have ended.

    Attributes:
        ddp: The DDP; made anew, collectively, when other parameters are trained.
    """

    ddp: DistributedDataParallel

    def __init__(self, module: nn.Module, options: dict[str, Any], job: Job) -> None:
        self._module = module
        self._options = options
        self._job = job
        self._has_common_buffers = any(True for _ in module.buffers()) and bool(
            options.get("broadcast_buffers", True)
        )
        self._norm = next(
            (each for each in module.modules() if isinstance(each, BATCH_NORMS)), None
        )
        self._common: int | None = None
        self._even_loop: object = None  # The last one that was looked at.
        self._parameters = list(module.parameters())
        self._trained: list[Tensor] = []
        self._frozen: list[Tensor] = []
        self._comm_hook: tuple[Any, Any] | None = None
        self._make()
        self._watched: list[Any] = []  # The node, which dies without it, and the hook.
        # Whether DDP takes part in the next backward pass, and whether it has done so
        # since the last forward pass.
        self._is_reduced = False
        self._is_over = False
        self.watch()

    @property
    def is_outdated(self) -> bool:
        """Whether other parameters are trained than when the DDP was made."""
        has_frozen = not all(map(_REQUIRES_GRAD, self._trained))
        return has_frozen or any(map(_REQUIRES_GRAD, self._frozen))

    @property
    def has_common_buffers(self) -> bool:
        """Whether no forward pass has changed them since they were made the same.

        One without gradients may. The first BatchNorm tells, which counts them.
        """
        return self._common is None or self._common == self._version_of_count()

    def _version_of_count(self) -> int | None:
        count = None if self._norm is None else self._norm.num_batches_tracked
        return None if count is None or is_compiling() else count._version

    @property
    def is_idle(self) -> bool:
        """Whether no parameter is trained: there is nothing to reduce."""
        return not any(each.requires_grad for each in self._parameters)

    def renew(self) -> None:
        """Make another DDP, for the parameters that are trained now. Collective."""
        # These keep the old DDP's hooks at the parameters.
        del self.ddp.reducer, self.ddp.logger
        self._unwatch()  # The backward pass of fix_buckets is not the program's.
        self._make()
        self.watch()

    def watch(self) -> None:
        """Watch a parameter for gradients that DDP does not see.

        It is the first that is trained: most losses reach it. To be called again when
        others are trained, or they have moved.
        """
        self._unwatch()
        first = next((each for each in self._parameters if each.requires_grad), None)
        if first is not None:
            node = get_gradient_edge(first).node
            self._watched = [node, node.register_prehook(self._check_gradient)]

    def forward(self, args: Any, kwargs: Any, *, is_step: bool) -> Any:
        """Return what the module returns; its gradients are averaged in a step."""
        ddp = self.ddp
        if not is_step:
            with ddp.no_sync():
                self._is_reduced = self._is_over = False
                return self.run(*args, **kwargs)
        is_reduced = ddp.require_backward_grad_sync
        self._is_reduced, self._is_over = is_reduced, False
        loader = loader_if_any()
        loop = None if loader is None else loader.running_loop
        if loader is not None and loop is not self._even_loop and self._module.training:
            check_even(loader)
            self._even_loop = loop
        output = self.run(*args, **kwargs)
        if self._module.training and not is_compiling():  # The count would be a guard.
            self._job.num_forward_passes += 1
            # With unused parameters, the watched one may have no gradient.
            if is_reduced and not ddp.find_unused_parameters:
                self._job.in_step.num_passes += 1
        if self._has_common_buffers and self._module.training and is_reduced:
            broadcast_buffers(ddp)
            self._common = self._version_of_count()
        return output

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do what DDP's `forward` does, without its entry in profiles if none is made.

        The entry takes longer than the rest. Nor does `__call__` find hooks to call, as
        nobody else has the DDP.
        """
        ddp: Any = self.ddp
        if profiler._is_profiler_enabled or is_compiling():
            return ddp.forward(*args, **kwargs)
        args, kwargs = ddp._pre_forward(*args, **kwargs)
        return ddp._post_forward(ddp._run_ddp_forward(*args, **kwargs))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook of DDP's communicate the gradients."""
        self.ddp.register_comm_hook(state, hook)
        self._comm_hook = state, hook

    def _make(self) -> None:
        ddp = self.ddp = DistributedDataParallel(self._module, **self._options)
        ddp.broadcast_buffers = False
        fix_buckets(ddp)
        if self._comm_hook is not None:
            ddp.register_comm_hook(*self._comm_hook)
        self._trained = [each for each in self._parameters if each.requires_grad]
        self._frozen = [each for each in self._parameters if not each.requires_grad]

    def _unwatch(self) -> None:
        if self._watched:
            self._watched[1].remove()
            self._watched = []

    def _check_gradient(self, _: tuple[Tensor | None, ...]) -> None:
        """Refuse a gradient of a second backward pass: DDP takes part in one only."""
        if not self._is_over:
            self._is_over = self._is_reduced
            self._job.in_step.num_reductions += (
                self._is_reduced and not self.ddp.find_unused_parameters
            )
            if self._is_reduced and self._job.rescue is not None:
                # DDP's last work is a callback, too, which comes before the second one.
                note = self._job.rescue.count_reduction
                call_after_backward(partial(call_after_backward, note))
            return
        raise ElasticRunError(
            f"gradients of {type(self._module).__name__} came after those of its last "
            "forward pass had been averaged over the replicas. They would stay this "
            "replica's own, and the replicas would drift apart. They come from a "
            "second backward pass through one output (retain_graph=True), from one of "
            "an earlier forward pass, or from a loss on the parameters alone. Add the "
            "losses and call backward() once, or call backward() for each loss right "
            "after its forward pass."
        )


def fix_buckets(ddp: DistributedDataParallel) -> None:
    """Make DDP build its final buckets now, by the model alone.

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
    ignored = ddp.parameters_to_ignore
    buffers = [each for name, each in ddp.module.named_buffers() if name not in ignored]
    broadcast(buffers, group=ddp.process_group)


def broadcast(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Give all replicas the tensors of rank 0, in the memory that they have."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        packed = torch.cat([each.detach().reshape(-1) for each in alike])
        dist.broadcast(packed, src=0, group=group)
        parts = torch.split(packed, [each.numel() for each in alike])
        for each, part in zip(alike, parts, strict=True):
            # Unknown to autograd, as in DDP: BatchNorm's backward pass would complain
            # of averages that it does not read.
            each.data.copy_(part.view_as(each))


def check_even(loader: LoaderInLoop) -> None:
    """Refuse to train in a loop in which a replica may have no batch."""
    if loader.even_batches:
        return
    raise ElasticRunError(
        f"an AdaptiveDataParallel is to train in the loop over `{loader.name}` "
        f"({loader.where}), which has even_batches=False. A replica without a sample "
        "in a short batch takes no part in it, so the others would wait forever for "
        "its gradients. To train, leave even_batches=False out: padding samples have "
        "no weight. To evaluate, call model.eval() and use torch.no_grad()."
    )


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
