"""Hooks that weigh the gradients of a module, and accumulate them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from elasticrun.errors import ElasticRunError, warn_at_program
from elasticrun.job.current import loader_if_any
from elasticrun.job.loop import LoaderInLoop, MicroBatchInfo
from elasticrun.job.stepping import is_between_micro_batches
from elasticrun.parallel.collectives import collective_in_backward
from elasticrun.parallel.noise_meter import NoiseMeter
from elasticrun.parallel.optimizer_hooks import OptimizerHooks
from elasticrun.parallel.partial_gradients import (
    HeldGradient,
    PartialGradients,
    current_micro_batch,
)
from elasticrun.parallel.rates import Rates
from elasticrun.parallel.reduction import Reduction
from elasticrun.parallel.step_check import StepCheck
from elasticrun.parallel.virtual import VirtualReduction
from elasticrun.parallel.weighing import Weighing, call_after_backward

_STEP_BEFORE_LOSS = (
    "in one iteration of the loop, a loss was computed after an optimizer had stepped "
    "the same model. With max_local_batch_size a global batch is cut into "
    "micro-batches, and the step comes only at the last one, so the losses before it "
    "see the old parameters. Add the losses and call backward() once, before the first "
    "step, or leave out max_local_batch_size."
)

_NEVER = object()

# What hooks do. Each kind does also what those before it do.
_NOTHING, _MEASURE, _WEIGH, _HIDE = range(4)


@dataclass
class _Pass:
    """A backward pass under way, or left by an exception: then autograd drops it.

    Attributes:
        loader: Of the loop that runs; None outside of any.
        hides: Whether its gradients go out of sight.
        is_step: Whether its micro-batch is the last one of the global batch.
        weight: Of losses that nobody else has weighed; None until one is met.
        factors: That weight for gradients of each type.
    """

    loader: LoaderInLoop | None
    hides: bool
    is_step: bool = True
    weight: float | None = None
    factors: dict[torch.dtype, Tensor] = field(default_factory=dict)


class GradientHooks:
    """Makes each global batch's gradient what one replica would have for the whole.

    A gradient that reaches a parameter is first multiplied with its micro-batch's
    weight, unless its loss was. Before the last micro-batch the sum is then taken out
    of sight, so that a program that clips, unscales or zeroes gradients after each
    micro-batch finds zeros.
    In the last one the sums come back before the first gradient is added, so that DDP
    reduces them, also for parameters that have no gradient there.

    The hooks sit on the graph's nodes that add to `.grad`: `torch.autograd.grad` passes
    them by, and the user's own hooks on parameters see the gradients of their loss. But
    such a node goes on asking Python for hooks when they are removed, which takes
    longer than a small layer. So where gradients are only measured, in one step of
    many, hooks sit on the parameters, unless the user's do.

    Args:
        module: With parameters to train.
        reduction: What averages their gradients over replicas, if there are several.
        weighing: Knows which backward passes begin with weighed losses.
        meter: Measures the noise of gradients in some steps, if it is to be known.
        virtual: Adds them up where virtual replicas share out batches; there gradients
            are hidden in the last micro-batch, too, until its backward pass has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        reduction: Reduction | None,
        *,
        weighing: Weighing,
        meter: NoiseMeter | None = None,
        virtual: VirtualReduction | None = None,
    ) -> None:
        # Who takes part.
        self._module = module
        self._weighing = weighing
        self._meter = meter
        self._measuring: NoiseMeter | None = None  # In a batch that is measured.
        self._virtual = virtual
        self._reduction = reduction
        self._partial = PartialGradients(
            list(module.parameters()),
            weighing,
            is_reduced=reduction is not None,
            virtual=virtual,
        )
        self._optimizers: list[OptimizerHooks] = []
        self._step_checks: list[StepCheck] = []

        # The hooks that there are, and what they do.
        self._kind = _NOTHING
        self._hooked = [False] * len(self._partial.held)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # Of these; a parameter's own reference is weak.

        # What later forward and backward passes need not look at again: the part for
        # which the hooks are right; and that whose gradients are only to be multiplied,
        # all with one weight, which stands here by their dtypes from the first one on.
        self._prepared_part: object = _NEVER
        self._multiplied_part: MicroBatchInfo | None = None
        self._multipliers: dict[torch.dtype, Tensor] = {}
        self._checked_loop: object = None  # The last one of `_check_own`.

        # The backward pass under way. Only what autograd calls after it holds on to it:
        # one that an exception has left is gone.
        self._pass: Callable[[], _Pass | None] = _no_pass
        self._models: list[GradientHooks]  # Whose passes end together: this one alone,
        self._models = [] if virtual is None else virtual.replicas.models  # or all.
        self._models.append(self)
        self._lock = threading.Lock()  # Autograd has one thread for each device.
        self._micro_batch: object = None  # In which the earlier ones' were hidden.
        self._has_warned = False

        # DDP that searches for unused parameters awaits a backward pass after its
        # forward pass.
        self._searches_unused = (
            reduction is not None and reduction.ddp.find_unused_parameters
        )
        self._awaits_backward = False

    @property
    def awaits_step(self) -> bool:
        """Whether gradients wait for the step of an optimizer."""
        return any(each.awaits_step for each in self._optimizers)

    def prepare(self, *, is_training: bool) -> bool:
        """Prepare a forward pass; return whether it is the last of its global batch.

        Where nothing is to be weighed or hidden, no hooks are left.
        """
        loader = loader_if_any()
        for check in self._step_checks:
            check.has_forward = True
        self._weighing.counts_met = None  # An exception may have left it.
        self._pass = _no_pass
        part, self._measuring = None, None
        if loader is not None:
            loop = loader.running_loop
            part = loop.current.part
            meter = self._meter
            if meter and loader.has_one_weight and meter.measures(loop.current):
                self._measuring = meter
            if is_training:
                for optimizer in self._optimizers:
                    optimizer.on_forward(loop)
        is_prepared = part is self._prepared_part and self._measuring is None
        if is_prepared and not self._partial.has_hidden:
            return True
        return self._place_hooks(loader, part)

    def check_not_stepped(self) -> None:
        """Refuse a forward pass behind the step, with virtual replicas.

        In the shares before the last one that a process trains, it would come before.
        Nothing is trained by one without gradients.
        """
        micro_batch = current_micro_batch()
        if micro_batch is None or not torch.is_grad_enabled():
            return
        is_late = self._partial.stepped_in is micro_batch
        if is_late or any(o.put_off_in is micro_batch for o in self._optimizers):
            raise ElasticRunError(
                "a forward pass came after the optimizer's step in one iteration of "
                "the loop, in a job with virtual_replicas. There is one step for all "
                "shares of a global batch, so how many of them see the new parameters "
                "would depend on the number of processes. Compute all losses before "
                "the first step, or use another loop for it."
            )

    def _place_hooks(
        self, loader: LoaderInLoop | None, part: MicroBatchInfo | None
    ) -> bool:
        """Register the hooks that a part needs; return whether it is the last one."""
        is_step = loader is None or loader.is_step
        weight: float | None = 1.0  # None where each loss has its own.
        if loader is not None:
            weight = loader.loss_weight if loader.has_one_weight else None
        self._partial.drop_abandoned()
        self._prepared_part, self._multiplied_part = _NEVER, None
        self._multipliers.clear()

        if self._partial.has_hidden or not is_step or self._virtual is not None:
            self._register(_HIDE)
        elif weight != 1.0:
            self._register(_WEIGH)
            # From the first gradient on, if that finds no other replicas' outputs in
            # its graph, all are multiplied, and forward passes need not come here.
            if weight and self._measuring is None and not self._searches_unused:
                self._multiplied_part = part
        elif self._measuring is not None:
            self._register(_MEASURE)
        else:
            self.unhook()
            if not self._searches_unused:  # Else DDP is to be looked at each time.
                self._prepared_part = part
        if self._searches_unused:
            self._make_ddp_forget(is_step=is_step)
        return is_step

    def add_optimizer(self, optimizer: Optimizer, *, rates: Rates | None) -> None:
        """Let an optimizer step once, with the gradients of whole global batches.

        Args:
            rates: Scales its learning rates, if they are to follow the size of batches.
        """
        check = StepCheck(optimizer, self._module)
        self._step_checks.append(check)
        self._optimizers.append(
            OptimizerHooks(
                optimizer,
                partial=self._partial,
                meter=self._meter,
                rates=rates,
                check=check,
                replicas=None if self._virtual is None else self._virtual.replicas,
            )
        )

    def zero_grad(self) -> None:
        """Zero what has been accumulated since the last step."""
        for optimizer in self._optimizers:
            optimizer.on_zero_grad()
        if self._partial.has_hidden:
            self._partial.zero(each.parameter for each in self._partial.held)

    def unhook(self) -> None:
        """Remove the hooks; `prepare` puts them back if it finds a need."""
        for hook in self._hooks:
            hook.remove()
        for held in self._partial.held if self._kind == _MEASURE else ():
            if not held.parameter._backward_hooks:  # Nothing asks for hooks any more.
                held.parameter._backward_hooks = None
        self._kind = _NOTHING
        self._hooks, self._nodes = [], []
        self._hooked = [False] * len(self._partial.held)
        self._prepared_part = _NEVER

    def _register(self, kind: int) -> None:
        """Have hooks of a kind, or of one that does more.

        These do no harm, and another change of hooks would cost more. Nor do those of
        parameters that were frozen since, which an earlier forward pass may still need.
        """
        trained = [held.parameter.requires_grad for held in self._partial.held]
        if trained == self._hooked and kind <= self._kind:
            return
        if kind > self._kind:
            self.unhook()
            self._kind = kind
        acts_behind = self._kind == _HIDE
        if self._virtual is not None:
            acts_behind = self._virtual.sends_early()
        for held, is_hooked in zip(self._partial.held, self._hooked, strict=True):
            if is_hooked or not held.parameter.requires_grad:
                continue
            self._hooked[held.number] = True
            if self._kind == _MEASURE and not held.parameter._backward_hooks:
                self._measure_at_parameter(held)
            else:
                self._register_at_node(held, acts_behind=acts_behind)

    def _measure_at_parameter(self, held: HeldGradient) -> None:
        def before(gradient: Tensor) -> Tensor | None:
            weighed = self._before_adding(held, gradient)
            return None if weighed is None else weighed[0]

        register: Any = held.parameter.register_hook
        self._hooks.append(register(before))

    def _register_at_node(self, held: HeldGradient, *, acts_behind: bool) -> None:
        node = get_gradient_edge(held.parameter).node
        weighing, weights, dtype = (
            self._weighing,
            self._multipliers,
            held.parameter.dtype,
        )

        def before(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
            gradient, weight = gradients[0], weights.get(dtype)
            if weight is None or gradient is None or weighing.counts_met is not None:
                return self._before_adding(held, gradient)
            return (gradient * weight,)  # What most have to do.

        self._nodes.append(node)
        self._hooks.append(node.register_prehook(before))
        if not acts_behind:
            return
        after = functools.partial(self._after_adding, held)
        if self._searches_unused:
            # After DDP's, which takes a parameter for unused if it sees no gradient.
            self._hooks.append(node.register_hook(after))
        else:
            # Before DDP's: if that still waits for the backward pass of an earlier
            # forward pass, it would reduce what it sees.
            register: Any = held.parameter.register_post_accumulate_grad_hook
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
        self, held: HeldGradient, gradient: Tensor | None
    ) -> tuple[Tensor] | None:
        """Do what is to be done before a gradient is added to `.grad`."""
        with self._lock:
            under_way = self._pass()
            if under_way is None:
                under_way = self._begin_pass()
                self._pass = weakref.ref(under_way)
            counts_met = self._weighing.counts_met
            if under_way.hides:
                self._partial.counts_met |= counts_met or {None}
                if self._virtual is None:
                    self._partial.make_room(held)
        weighed = self._weigh(under_way, gradient, counts_met)
        if self._measuring is not None and gradient is not None:
            self._measuring.add(
                held.parameter, gradient if weighed is None else weighed[0]
            )
        return weighed

    def _weigh(
        self,
        under_way: _Pass,
        gradient: Tensor | None,
        counts_met: set[int | None] | None,
    ) -> tuple[Tensor] | None:
        """Return a gradient with its micro-batch's weight, None if it has it."""
        loader = under_way.loader
        if loader is None:
            return None
        if counts_met is not None:
            # What comes through a weighed loss was weighed on its way.
            weight = float(loader.running_loop.current.part.num_valid > 0)
        else:
            if under_way.weight is None:
                under_way.weight = loader.loss_weight
                if loader.running_loop is not self._checked_loop:
                    self._check_own(loader, under_way.weight)
            weight = under_way.weight
        if gradient is None or weight == 1.0:
            return None
        if weight == 0.0:  # A padding sample's, which may be infinite.
            return (torch.zeros_like(gradient),)
        factor = under_way.factors.get(gradient.dtype)
        if factor is None:
            factor = _factor(weight, gradient.dtype)
            under_way.factors[gradient.dtype] = factor
        part = self._multiplied_part
        if counts_met is None and part is loader.running_loop.current.part:
            self._prepared_part = part
            self._multipliers[gradient.dtype] = factor
        return (gradient * factor,)

    def _begin_pass(self) -> _Pass:
        """Get ready for the first gradient of a backward pass."""
        loader, meter = loader_if_any(), self._measuring
        if meter is not None and loader is not None:
            meter.begin_pass(loader.running_loop)
        hides = loader is not None and (not loader.is_step or self._virtual is not None)
        begun = _Pass(loader, hides=hides, is_step=loader is None or loader.is_step)
        # In two turns, so that DDP's own callback, which averages, comes before.
        end = functools.partial(self._end_passes, begun)
        call_after_backward(lambda: call_after_backward(end))
        if self._virtual is not None:
            self._virtual.begin_backward(loader)
            self._partial.check_shown()
        if loader is not None and hides:
            self._hide_earlier(loader)
            if self._virtual is not None:
                self._partial.begin_pass()
            return begun
        self._awaits_backward = False
        correction = self._partial.show()
        if meter is not None and correction is not None:
            meter.correct(correction)
        return begun

    def _end_passes(self, _: _Pass) -> None:
        """End the pass; of virtual replicas, for all models in the order of creation.

        Their first gradients may come in another order in each process, and some of
        them in one process alone: then all take part.
        """
        has_gradient = [each._pass() is not None for each in self._models]
        if not any(has_gradient):
            return  # The first call of this pass has ended it for all.
        if self._virtual is not None and not is_between_micro_batches():
            has_gradient = self._virtual.have_any(has_gradient, self._weighing.group)
        for model, has_any in zip(self._models, has_gradient, strict=True):
            if has_any:
                model._end_pass()

    def _end_pass(self) -> None:
        """Get ready for another backward pass; look at what this one has come to."""
        if self._pass() is None:
            self._begin_pass()  # All gradients of it have come in other processes.
        self._pass = _no_pass
        is_step = not is_between_micro_batches()
        if self._virtual is not None:
            self._virtual.end_backward()
            if is_step:
                self._partial.show_means(self._virtual)
            else:
                self._partial.end_pass()
        if is_step and self._measuring is not None:
            self._measuring.end_pass()

    def _after_adding(self, held: HeldGradient, *_: Any) -> None:
        """Take a gradient out of sight, or on its way to the other processes."""
        under_way = self._pass()
        if under_way is None or not under_way.hides:
            return
        if self._virtual is None:
            self._partial.hide(held)
        elif under_way.is_step:
            with self._lock:
                self._virtual.send_ready(held.number, self._partial.sum_of)

    def _check_own(self, loader: LoaderInLoop, weight: float) -> None:
        """Refuse a loss that reads other replicas' outputs, which has no own weight."""
        if weight == 1.0:
            return
        self._checked_loop = loader.running_loop
        node = None if self._reduction is None else collective_in_backward()
        if node is not None:
            raise ElasticRunError(
                f"the backward pass goes through {node}, which communicates, so the "
                "loss of one replica uses values of the others. Replicas' shares in "
                f"this global batch differ (this one's weighs {weight:.3f} times their "
                "mean), and after the exchange gradients can no longer be weighed at "
                "the parameters. Weigh the loss where it begins: "
                "model.weigh(loss).backward()."
            )

    def _hide_earlier(self, loader: LoaderInLoop) -> None:
        """Hide what `.grad` held before this micro-batch's first gradient."""
        micro_batch = loader.running_loop.current
        has_stepped = any(each.put_off_in is micro_batch for each in self._optimizers)
        if has_stepped and self._meter is not None:
            self._meter.spoil()
        if has_stepped and not self._has_warned:
            self._has_warned = True
            warn_at_program(_STEP_BEFORE_LOSS)
        if self._micro_batch is not micro_batch:
            self._micro_batch = micro_batch
            self._partial.hide_all()


def _no_pass() -> None:
    """Return what there is while no backward pass is under way."""


def _factor(weight: float, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor, which torch need not convert for each gradient.

    Of a low precision it would itself be rounded to that.
    """
    kept = dtype if dtype == torch.float32 else torch.float64
    return torch.tensor(weight, dtype=kept, device="cpu")
