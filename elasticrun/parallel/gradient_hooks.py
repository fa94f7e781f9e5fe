"""Hooks that weigh a module's gradients, and hide them until the last micro-batch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from elasticrun.errors import ElasticRunError, warn_at_program
from elasticrun.job.current import running_loader
from elasticrun.job.loop import Loop, Share, Turns
from elasticrun.job.pace import Pace
from elasticrun.job.stepping import (
    Method,
    is_between_micro_batches,
    step_between_micro_batches,
    wrap_method,
)
from elasticrun.parallel.crossing import crossing_node, reaches_unweighed
from elasticrun.parallel.partial_gradients import PartialGradients, parameters_of
from elasticrun.parallel.reduction import Reduction
from elasticrun.parallel.rehearsal import Rehearsal
from elasticrun.parallel.unstepped import Unstepped
from elasticrun.parallel.weighing import Weighing, factor_of

_STEP_BEFORE_LOSS = (
    "a loss was computed after an optimizer had stepped the same model in one turn of "
    "the loop. Where max_local_batch_size cuts a global batch into micro-batches, the "
    "step is taken at the last one, so the losses before that see the parameters of "
    "before the step. To get what whole batches would give, add the losses and call "
    "backward() once, before the first step, or leave out max_local_batch_size."
)


class GradientHooks:
    """Makes each global batch's gradient what one replica would have for the whole.

    A gradient that reaches a parameter is first multiplied with its micro-batch's
    weight, unless its loss was. Before the last micro-batch the sum is then taken out
    of sight, so that a program that clips, unscales or zeroes gradients after each
    micro-batch finds zeros.
    In the last one the sums come back before the first gradient is added, so that DDP
    reduces them, also for parameters that have no gradient there.

    The hooks sit on the graph's nodes that add to `.grad`: `torch.autograd.grad` passes
    them by, and the user's own hooks on parameters see the gradients of their loss.

    Args:
        module: With parameters to train.
        reduction: What averages their gradients over replicas, if there are several.
        may_be_unused: Whether parameters may have no gradient in a step.
        pace: Is told when an optimizer steps, at which nobody is waited for.
        weighing: Knows which backward passes begin with weighed losses.
    """

    def __init__(
        self,
        module: nn.Module,
        reduction: Reduction | None,
        *,
        may_be_unused: bool,
        pace: Pace,
        weighing: Weighing,
    ) -> None:
        self._weighing = weighing
        self._parameters = list(module.parameters())
        self._partial = PartialGradients(
            self._parameters, is_reduced=reduction is not None
        )
        self._reduction = reduction
        self._rehearsal: Rehearsal | None = None
        if reduction is None:
            self._rehearsal = Rehearsal(module, may_be_unused=may_be_unused)
        self._pace = pace
        self._searches_unused = (
            reduction is not None and reduction.ddp.find_unused_parameters
        )
        self._awaits_backward = False
        self._hooked: list[bool] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # Autograd has one thread for each device.
        self._is_active = True  # Whether there is more to do than to look for weights.
        self._plain_part: Share | None = None  # Needs none, and nothing hidden.
        self._sole_part: Share | None = None  # Is to be weighed, and nothing besides.
        self._sole_weight: Tensor | None = None  # Known from its first gradient on.
        self._hides_too = False  # Whether the hooks are also those that hide.
        self._micro_batch: object = None
        self._counted_in: object = None
        self._checked_loop: object = None
        self._checked_mix: object = None
        self._has_warned = False
        self._follows = False
        self._unstepped = Unstepped()

    @property
    def has_unstepped(self) -> bool:
        """Whether gradients wait for the step of an optimizer that is followed."""
        return self._unstepped.is_pending(_running_loop())

    def prepare(self, *, is_training: bool) -> bool:
        """Get ready for a forward pass; return whether it is the global batch's last.

        Where nothing is to be weighed or hidden, no hooks are left.
        """
        loader = running_loader()
        self._weighing.parts = None  # In case that an exception has left them.
        if self._rehearsal is not None:
            self._rehearse(loader)
        part = None
        if loader is not None:
            loop = loader.running_loop
            part = loop.current[2]
            if self._follows and is_training:
                self._unstepped.note_forward(loop)
            is_sole = part is self._sole_part and loop is self._checked_loop
            if is_sole and not self._partial.hides:
                return True
        if part is self._plain_part and not self._is_active:
            return True
        is_step = True
        weight: float | None = 1.0  # None where each loss has its own.
        if loader is not None:
            is_step = loader.is_step
            weight = loader.loss_weight if loader.has_one_weight else None
        self._partial.drop_abandoned()
        hides = self._partial.hides or not is_step
        self._sole_part = self._sole_weight = None
        if hides or weight != 1.0:
            self._hook(hides=hides)
            if weight and not (hides or self._searches_unused):
                self._sole_part = part
        else:
            self.unhook()
            self._plain_part = part
        self._is_active = bool(self._hooks) or self._searches_unused
        if self._searches_unused:
            self._make_ddp_forget(is_step=is_step)
        return is_step

    def _rehearse(self, loader: Loop | None) -> None:
        assert self._rehearsal is not None
        self._rehearsal.note_forward(is_step=loader is None or loader.is_step)
        if self._rehearsal.is_over:
            self._rehearsal = None

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer step once, and decide which partial gradients count."""
        partial = self._partial
        partial.add_optimizer(optimizer)
        unstepped = self._unstepped
        unstepped.add(optimizer)
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
                    if self._reduction is not None:
                        self._pace.begin(loop)
                has_closure = bool(args or kwargs)
                if has_closure and self._decides_by_loss(optimizer):
                    args, kwargs = (self._of_all(*args, **kwargs),), {}
                unstepped.note_step(optimizer, loop, has_closure=has_closure)
                hides = partial.hides
                if hides and not has_closure:  # Its backward pass is yet to come.
                    self._correct()
                    partial.show_the_rest()
                if self._rehearsal is not None and not has_closure and loop is not None:
                    self._rehearsal.note_step(optimizer)
                result = method(optimizer, *args, **kwargs)
                if hides:
                    partial.drop_counted(optimizer)
                return result

            return step

        wrap_method(optimizer, "step", stepping, acts_once=True)
        wrap_method(optimizer, "zero_grad", self._zeroing)

    def zero_grad(self) -> None:
        """Zero what has been accumulated since the last step."""
        self._unstepped.note_all_zeroed(_running_loop())
        if self._partial.hides:
            self._partial.zero()

    def _zeroing(self, method: Method) -> Method:
        partial, unstepped = self._partial, self._unstepped

        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            loader = running_loader()
            loop = None if loader is None else loader.running_loop
            unstepped.note_zeroed(optimizer, loop)
            if partial.hides:
                partial.zero(parameters_of(optimizer))
            method(optimizer, *args, **kwargs)

        return zero_grad

    def unhook(self) -> None:
        """Remove the hooks; `prepare` puts them back if it finds a need."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], []
        self._is_active = True
        self._sole_part = self._sole_weight = None

    def _decides_by_loss(self, optimizer: Optimizer) -> bool:
        return self._reduction is not None and isinstance(optimizer, torch.optim.LBFGS)

    def _of_all(self, closure: Callable[[], Any]) -> Callable[[], Tensor]:
        """Return a closure that returns the loss of the whole global batch.

        By which LBFGS decides how often it calls that; with their own losses, replicas
        would do so differently often, and wait for each other without end.
        """

        def evaluate() -> Tensor:
            num_weighed = self._weighing.num_passes
            loss = torch.as_tensor(closure())
            factor = factor_of(loss)
            if factor is None:
                if self._weighing.num_passes != num_weighed:
                    raise ElasticRunError(
                        "the closure of LBFGS weighed a loss, but returned something "
                        "else, of which the mean over all replicas is not known. "
                        "Return what weigh() has returned."
                    )
                loader = running_loader()
                factor = 1.0 if loader is None else loader.loss_weight
            with torch.no_grad():
                own = torch.as_tensor(factor, dtype=torch.float64, device=loss.device)
                own = torch.where(own == 0, 0.0, loss.detach() * own)
                dist.all_reduce(own)
                return (own / dist.get_world_size()).to(loss.dtype)

        return evaluate

    def _hook(self, *, hides: bool) -> None:
        hooked = [parameter.requires_grad for parameter in self._parameters]
        if hooked == self._hooked and (self._hides_too or not hides):
            return  # Those that hide do no harm; another change of hooks costs more.
        self.unhook()
        self._hides_too = hides
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._hook_one(parameter)
        self._hooked = hooked

    def _hook_one(self, parameter: Tensor) -> None:
        node = get_gradient_edge(parameter).node
        weighing = self._weighing

        def before(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
            gradient, weight = gradients[0], self._sole_weight
            if weight is None or gradient is None or weighing.parts is not None:
                return self._before_adding(parameter, gradient)
            return (gradient * weight,)  # What most have to do.

        self._hooks += [_Held(node), node.register_prehook(before)]
        if not self._hides_too:
            return
        after = functools.partial(self._after_adding, parameter)
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
        assert self._reduction is not None
        ddp = self._reduction.ddp
        if is_step:
            self._awaits_backward |= ddp.require_backward_grad_sync
        elif self._awaits_backward:
            self._awaits_backward = False
            ddp.reducer._reset_state()

    def _before_adding(
        self, parameter: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor] | None:
        loader = running_loader()
        parts = self._weighing.parts
        with self._lock:
            if loader is None or loader.is_step:
                self._awaits_backward = False
                self._correct()
                self._partial.show()
            else:
                self._hide_earlier(loader)
                self._partial.make_room(parameter)
                self._partial.parts |= {None} if parts is None else parts
        weight = 1.0
        if loader is not None and parts is None:
            weight = loader.loss_weight
            loop = loader.running_loop
            if loop is not self._checked_loop:
                self._check_own(loader, weight)
            if loop is self._checked_loop and loop.current[2] is self._sole_part:
                # As a number it would be made a tensor at each parameter.
                self._sole_weight = torch.tensor(
                    weight, dtype=torch.float64, device="cpu"
                )
        elif loader is not None:
            if loader.running_loop.current[2].num_valid == 0:
                weight = 0.0  # Others were weighed on their way in.
            if loader.running_loop is not self._checked_mix:
                self._check_mix(loader)
        if gradient is None or weight == 1.0:
            return None
        if weight == 0.0:  # A padding sample's, which may be infinite.
            return (torch.zeros_like(gradient),)
        return (gradient * weight,)

    def _after_adding(self, parameter: Tensor, *_: Any) -> None:
        if is_between_micro_batches():
            self._partial.hide(parameter)

    def _check_own(self, loader: Loop, weight: float) -> None:
        """Refuse a loss that reads other replicas' outputs, which has no own weight."""
        if weight == 1.0:
            return
        self._checked_loop = loader.running_loop
        node = None if self._reduction is None else crossing_node()
        if node is not None:
            raise ElasticRunError(
                f"the backward pass goes through {node}, which communicates, so the "
                "loss of one replica reads what others have computed. Replicas' shares "
                f"in this global batch differ (this one's weighs {weight:.3f} times "
                "their mean), and gradients that have crossed over cannot be weighed "
                "at the parameters any more. Weigh the loss where it begins: "
                "model.weigh(loss).backward()."
            )

    def _check_mix(self, loader: Loop) -> None:
        """Warn, once a loop, of a part that is not weighed where each needs its own."""
        self._checked_mix = loader.running_loop
        if not loader.has_one_weight and reaches_unweighed({*self._parameters}):
            warn_at_program(
                f"a part of the loss is weighed, and a part is not, in the loop over "
                f"`{loader.name}` ({loader.where}), whose members' batches do not "
                "divide alike. What is not weighed counts as if they did. Let each "
                "loss go through model.weigh(loss, member=...), and what depends on no "
                "batch (a penalty on parameters) with any of the members."
            )

    def _correct(self) -> None:
        """Weigh what is hidden by counts whose sums were not known yet."""
        self._partial.drop_abandoned()
        parts = self._partial.parts
        if parts and parts != {None}:
            self._partial.correct(self._weighing.correction(parts))
        self._partial.parts = set()

    def _hide_earlier(self, loader: Loop) -> None:
        """Hide what `.grad` held before this micro-batch's first gradient."""
        micro_batch = loader.running_loop.current
        if self._counted_in is micro_batch and not self._has_warned:
            self._has_warned = True
            warn_at_program(_STEP_BEFORE_LOSS)
        if self._micro_batch is not micro_batch:
            self._micro_batch = micro_batch
            self._partial.hide_all()


def _running_loop() -> Turns | None:
    loader = running_loader()
    return None if loader is None else loader.running_loop


class _Held:
    """Keeps a node alive, of which a parameter itself has a weak reference only."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def remove(self) -> None:
        self._node = None
