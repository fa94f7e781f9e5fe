"""Wraps an optimizer's `step` and `zero_grad`, which wait for the last micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import note_step
from elasticrun.job.loop import Loop, MicroBatch
from elasticrun.job.stepping import replace_method, step_between_micro_batches
from elasticrun.job.virtual import VirtualReplicas
from elasticrun.parallel.noise_meter import NoiseMeter
from elasticrun.parallel.partial_gradients import PartialGradients, loop_if_any
from elasticrun.parallel.rates import Rates
from elasticrun.parallel.step_check import StepCheck

_Gradients = dict[Tensor, tuple[Tensor | None, int]]

_MANY = 2  # Batches in which gradients were thrown away, without a step: on purpose.

_ZEROED_TOO_LATE = (
    "gradients were zeroed between a backward pass and the step, at the last "
    "micro-batch of a global batch. This also removed those of the earlier "
    "micro-batches, so the step would miss them. Call zero_grad before the first "
    "backward pass of each iteration. If the loss of another module goes through this "
    "one (a generator's loss through the discriminator, for example), step this one "
    "before, or freeze it meanwhile (requires_grad_(False)); or leave out "
    "max_local_batch_size."
)


class OptimizerHooks:
    """Lets an optimizer step once in a global batch, with the gradients of all of it.

    It also knows whether gradients wait for a step, since those are in no checkpoint. A
    forward pass for training tells, which replicas make alike: its gradients wait until
    the optimizer steps, over the ends of loops and epochs. In a loop that had no step
    yet, which may be an evaluation, it counts once a gradient has come. Those of one
    that comes after the step, in an iteration whose step had a forward pass of its own,
    are taken to be thrown away: it was for the accuracy, or for the loss of another
    module. So are gradients that are zeroed in batch after batch without a step.

    Args:
        optimizer: Whose methods are replaced.
        partial: The gradients that are hidden before its step.
        meter: Is told of each step, if the noise of gradients is measured.
        rates: Scales learning rates, if they are to follow the size of batches.
        check: Looks at where the gradients of a step come from.
        replicas: Virtual ones, which its step makes alike.

    Attributes:
        put_off_in: The last micro-batch in which its step was put off to the global
            batch's last one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        partial: PartialGradients,
        meter: NoiseMeter | None = None,
        rates: Rates | None = None,
        check: StepCheck | None = None,
        replicas: VirtualReplicas | None = None,
    ) -> None:
        self.put_off_in: MicroBatch | None = None
        self._optimizer = optimizer
        self._partial = partial
        self._meter = meter
        self._rates = rates
        self._check = check
        self._replicas = replicas
        if replicas is not None:
            replicas.optimizers.add(optimizer)
        # Where gradients wait, if any do, and since which batch.
        self._waiting_in: Loop | None = None
        self._waiting_since = 0
        self._before: _Gradients | None = None  # There before; None: surely some wait.
        # Of the last forward pass that waits, and of the last step that had one.
        self._forward_in: MicroBatch | None = None
        self._step_in: MicroBatch | None = None
        self._step_loop: Loop | None = None
        self._num_thrown_away = 0  # In how many batches since the last step.
        self._stepped_in: MicroBatch | None = None  # The last step.
        self._lost_in: MicroBatch | None = None  # Where shown sums were zeroed instead.
        replace_method(optimizer, "step", self._step, acts_once=True)
        replace_method(optimizer, "zero_grad", self._zero_grad)

    @property
    def awaits_step(self) -> bool:
        """Whether gradients wait for a step."""
        if self._waiting_in is None or self._num_thrown_away >= _MANY:
            return False
        return self._before is None or self._have_come_since(self._before)

    def on_forward(self, loop: Loop) -> None:
        """Note a forward pass for training, in a running loop."""
        micro_batch = loop.current
        if micro_batch is not self._step_in:
            if self._waiting_in is not loop:
                is_sure = self.awaits_step or loop is self._step_loop
                self._before = None if is_sure else self._gradients()
                self._waiting_in, self._waiting_since = loop, micro_batch.number
            self._forward_in = micro_batch

    def on_backward(self) -> None:
        """Note that gradients have come which `.grad` may not show yet."""
        self._before = None

    def on_zero_grad(self) -> None:
        """Note that the gradients are about to be zeroed."""
        loop = loop_if_any()
        micro_batch = None if loop is None else loop.current
        is_lost = micro_batch is not None and self._partial.shown_in is micro_batch
        if is_lost and self._stepped_in is not micro_batch:
            self._lost_in = micro_batch
        if loop is not None and self._waiting_in is loop:
            # Between the first forward pass and its backward pass nothing is thrown
            # away; and what is zeroed before that one is no evaluation's.
            self._before = None
            if self._waiting_since == loop.current.number:
                return
        if self._waiting_in is not None:
            self._num_thrown_away += 1
            self._waiting_in = None

    def _gradients(self) -> _Gradients:
        """Return the gradients that are there, and how often each has changed."""
        gradients = {each: each.grad for each in parameters_of(self._optimizer)}
        return {
            each: (g, 0 if g is None else g._version) for each, g in gradients.items()
        }

    def _have_come_since(self, before: _Gradients) -> bool:
        for parameter in parameters_of(self._optimizer):
            gradient = parameter.grad
            earlier, version = before.get(parameter, (None, 0))
            if gradient is None:
                continue
            if gradient is not earlier or gradient._version != version:
                return True
        return False

    def _on_step(self, loop: Loop | None, *, has_closure: bool) -> None:
        """Note that the optimizer steps, in a loop or (None) outside.

        Args:
            has_closure: Whether the forward pass is yet to come.
        """
        micro_batch = None if loop is None else loop.current
        if has_closure or micro_batch is self._forward_in:
            self._step_in = micro_batch
        self._step_loop = loop
        self._waiting_in = self._before = None
        self._num_thrown_away = 0

    def _step(
        self, method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        loop = loop_if_any()
        if loop is not None:
            if not loop.current.part.is_step:
                return self._put_off(optimizer, loop.current, *args, **kwargs)
            if self._lost_in is loop.current:
                raise ElasticRunError(_ZEROED_TOO_LATE)
            self._stepped_in = loop.current
        has_closure = bool(args or kwargs)  # Then the backward pass is in that.
        if self._check is not None:
            if self._replicas and self._check.has_forward and not has_closure:
                self._partial.check_reduced(optimizer)
            self._check.look(loop)
        note_step()
        self._on_step(loop, has_closure=has_closure)
        alike: AbstractContextManager[None] = nullcontext()
        if self._replicas is not None:
            args, kwargs = _with_closure_called(optimizer, args, kwargs)
            alike = self._replicas.stepping(optimizer)
        if self._partial.has_hidden and not has_closure:
            self._partial.show_before_step()
        scaled = nullcontext() if self._rates is None else self._rates.scaled(optimizer)
        with alike:
            with scaled:
                result = method(optimizer, *args, **kwargs)
            self._partial.forget_stepped(optimizer)
        if self._meter is not None:
            self._meter.end_step(loop)
        if self._rates is not None:
            self._rates.end_step()
        return result

    def _put_off(
        self, optimizer: Optimizer, micro_batch: MicroBatch, *args: Any, **kwargs: Any
    ) -> Any:
        """Note that gradients are due: the global batch is incomplete."""
        result = step_between_micro_batches(optimizer, *args, **kwargs)
        self._partial.hold_for_step(optimizer, is_again=self.put_off_in is micro_batch)
        self.put_off_in = micro_batch
        return result

    def _zero_grad(
        self, method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        self.on_zero_grad()
        if self._partial.has_hidden:
            self._partial.zero(parameters_of(optimizer))
        method(optimizer, *args, **kwargs)


def _with_closure_called(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a step whose closure has been called, as in earlier shares.

    Before what the step draws and changes: it has what it draws from its share.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    results = [step_between_micro_batches(optimizer, *args, **kwargs)]

    def once() -> Any:
        if results:
            return results.pop()
        raise ElasticRunError(
            f"{type(optimizer).__name__}.step called its closure twice, in a job with "
            "virtual_replicas. The earlier shares of the global batch have called it "
            "once. Use an optimizer that does so, or leave virtual_replicas out."
        )

    return ((once, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": once})
