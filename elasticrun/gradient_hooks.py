"""Hooks that weigh a module's gradients, and hide them until the last micro-batch."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elasticrun.accumulation import (
    Method,
    is_between_micro_batches,
    step_between_micro_batches,
    wrap_method,
)
from elasticrun.current import running_loader
from elasticrun.pace import Pace
from elasticrun.partial_gradients import PartialGradients, parameters_of
from elasticrun.postponing import Unstepped

if TYPE_CHECKING:
    from elasticrun.data.loader import AdaptiveDataLoader
    from elasticrun.data.plan import Part

_STEP_BEFORE_LOSS = (
    "a loss was computed after an optimizer had stepped the same model in one turn of "
    "the loop. Where max_local_batch_size cuts a global batch into micro-batches, the "
    "step is taken at the last one, so the losses before that see the parameters of "
    "before the step. To get what whole batches would give, compute all losses before "
    "the first step, or leave out max_local_batch_size."
)


class GradientHooks:
    """Makes each global batch's gradient what one replica would have for the whole.

    A gradient that reaches a parameter is first multiplied with its micro-batch's
    weight. Before the last micro-batch the sum is then taken out of sight, so that a
    program that clips, unscales or zeroes gradients after each micro-batch finds none.
    In the last one the sums come back before the first gradient is added, so that DDP
    reduces them, also for parameters that have no gradient there.

    The hooks sit on the graph's nodes that add to `.grad`: `torch.autograd.grad` passes
    them by, and the user's own hooks on parameters see the gradients of their loss.

    Args:
        parameters: Those of one module.
        ddp: What reduces their gradients over replicas.
        pace: Is told when an optimizer steps, at which nobody is waited for.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        ddp: DistributedDataParallel | None,
        *,
        pace: Pace,
    ) -> None:
        self._parameters = list(parameters)
        self._partial = PartialGradients(self._parameters, is_reduced=ddp is not None)
        self._ddp = ddp
        self._pace = pace
        self._searches_unused = ddp is not None and ddp.find_unused_parameters
        self._awaits_backward = False
        self._hooked: list[bool] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # Autograd has one thread for each device.
        self._is_active = True  # Whether there is more to do than to look for weights.
        self._plain_part: Part | None = None  # Needs none, and nothing hidden.
        self._micro_batch: object = None
        self._counted_in: object = None
        self._has_warned = False
        self._follows = False
        self._unstepped = Unstepped()

    @property
    def has_unstepped(self) -> bool:
        """Whether gradients wait for the step of an optimizer that is followed."""
        loader = running_loader()
        running = None if loader is None else loader.running_loop
        return self._unstepped.is_pending(running)

    def prepare(self, *, is_training: bool) -> bool:
        """Get ready for a forward pass; return whether it is the global batch's last.

        Where nothing is to be weighed or hidden, no hooks are left.
        """
        loader = running_loader()
        part = None
        if loader is not None:
            loop = loader.running_loop
            part = loop.current[2]
            if self._follows and is_training:
                self._unstepped.note_forward(loop, loop.current)
        if part is self._plain_part and not self._is_active:
            return True
        is_step, weight = True, 1.0
        if loader is not None:
            is_step, weight = loader.is_step, loader.loss_weight
        self._partial.drop_abandoned()
        if self._partial.hides or weight != 1.0 or not is_step:
            self._hook()
        else:
            self.unhook()
            self._plain_part = part
        self._is_active = bool(self._hooks) or self._searches_unused
        if self._searches_unused:
            self._make_ddp_forget(is_step=is_step)
        return is_step

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer step once, and decide which partial gradients count."""
        partial = self._partial
        partial.add_optimizer(optimizer)
        self._follows = True
        counted_in: object = None

        def stepping(method: Method) -> Method:
            def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                nonlocal counted_in
                loader = running_loader()
                loop = micro_batch = None
                if loader is not None:
                    loop = loader.running_loop
                    micro_batch = loop.current
                    if not micro_batch[2].is_step:
                        result = step_between_micro_batches(optimizer, *args, **kwargs)
                        partial.count(optimizer, is_again=counted_in is micro_batch)
                        counted_in = self._counted_in = micro_batch
                        return result
                    if self._ddp is not None:
                        self._pace.begin(loop)
                has_closure = bool(args or kwargs)
                self._unstepped.note_step(loop, micro_batch, has_closure=has_closure)
                if not partial.hides:
                    return method(optimizer, *args, **kwargs)
                if not has_closure:  # Its backward pass is yet to come.
                    partial.show_the_rest()
                result = method(optimizer, *args, **kwargs)
                partial.drop_counted(optimizer)
                return result

            return step

        wrap_method(optimizer, "step", stepping, acts_once=True)
        wrap_method(optimizer, "zero_grad", functools.partial(_zeroing, partial))

    def zero_grad(self) -> None:
        """Zero what has been accumulated since the last step."""
        if self._partial.hides:
            self._partial.zero()

    def unhook(self) -> None:
        """Remove the hooks; `prepare` puts them back if it finds a need."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], []
        self._is_active = True

    def _hook(self) -> None:
        hooked = [parameter.requires_grad for parameter in self._parameters]
        if hooked == self._hooked:
            return
        self.unhook()
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._hook_one(parameter)
        self._hooked = hooked

    def _hook_one(self, parameter: Tensor) -> None:
        node = get_gradient_edge(parameter).node
        before = functools.partial(self._before_adding, parameter)
        after = functools.partial(self._after_adding, parameter)
        self._hooks += [_Held(node), node.register_prehook(before)]
        if self._searches_unused:
            # After DDP's, which takes a parameter for unused if it sees no gradient.
            self._hooks.append(node.register_hook(after))
        else:
            # Before DDP's: if that still waits for the backward pass of an earlier
            # forward pass, it would reduce what it sees.
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(after))

    def _make_ddp_forget(self, *, is_step: bool) -> None:
        """Let DDP wait no more for the backward pass of an earlier forward pass.

        It would reduce the first partial gradients instead, and forget what was used.
        """
        assert self._ddp is not None
        if is_step:
            self._awaits_backward |= self._ddp.require_backward_grad_sync
        elif self._awaits_backward:
            self._awaits_backward = False
            self._ddp.reducer._reset_state()

    def _before_adding(
        self, parameter: Tensor, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor] | None:
        gradient = gradients[0]
        loader = running_loader()
        with self._lock:
            if loader is None or loader.is_step:
                self._awaits_backward = False
                self._partial.show()
            else:
                self._hide_earlier(loader)
                self._partial.hide(parameter, is_own=False)
        weight = 1.0 if loader is None else loader.loss_weight
        if gradient is None or weight == 1.0:
            return None
        if weight == 0.0:  # A padding sample's, which may be infinite.
            return (torch.zeros_like(gradient),)
        return (gradient * weight,)

    def _after_adding(self, parameter: Tensor, *_: Any) -> None:
        if is_between_micro_batches():
            self._partial.hide(parameter)

    def _hide_earlier(self, loader: AdaptiveDataLoader) -> None:
        """Hide what `.grad` held before this micro-batch's first gradient."""
        micro_batch = loader.running_loop.current
        if self._counted_in is micro_batch and not self._has_warned:
            self._has_warned = True
            warnings.warn(_STEP_BEFORE_LOSS, stacklevel=2)
        if self._micro_batch is not micro_batch:
            self._micro_batch = micro_batch
            self._partial.hide_all()


def _zeroing(partial: PartialGradients, method: Method) -> Method:
    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if partial.hides:
            partial.zero(parameters_of(optimizer))
        method(optimizer, *args, **kwargs)

    return zero_grad


class _Held:
    """Keeps a node alive, of which a parameter itself has a weak reference only."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def remove(self) -> None:
        self._node = None
