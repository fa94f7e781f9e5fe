"""Weighs and adds up the gradients of a module sharded by `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from elasticrun.errors import ElasticRunError
from elasticrun.job.current import loader_if_any
from elasticrun.job.loop import LoaderInLoop, Loop
from elasticrun.parallel.noise_meter import NoiseMeter
from elasticrun.parallel.optimizer_hooks import OptimizerHooks
from elasticrun.parallel.partial_gradients import PartialGradients, current_global_batch
from elasticrun.parallel.rates import Rates
from elasticrun.parallel.weighing import Weighing, call_after_backward, weighed_by

_PLAIN = (Tensor, int, float, str, bytes, type(None))


class ShardedGradients:
    """Makes each global batch's gradient what one replica would have for the whole.

    FSDP averages gradients on their way, so they are weighed where they enter the
    module: at what it returned. Between micro-batches each replica's own gradients stay
    within FSDP, and are averaged in the last one. Only where a micro-batch's gradient
    has to be known, for the noise or since a count's sum comes with the last one, they
    are averaged in each, and added up here, where the program does not see them.

    Args:
        module: What `fully_shard` was called for last.
        weighing: Knows which backward passes begin with weighed losses.
        meter: Measures the noise of gradients in some steps, if it is to be known.
    """

    def __init__(
        self, module: nn.Module, *, weighing: Weighing, meter: NoiseMeter | None
    ) -> None:
        self._module = module
        self._weighing = weighing
        self._meter = meter
        self._measuring: NoiseMeter | None = None  # In a batch that is measured.
        self._parameters = list(module.parameters())
        self._optimizers: list[OptimizerHooks] = []
        self._nothing_hidden = _NothingHidden([], weighing, is_reduced=True)
        self._is_apart = False  # In the program's own `no_sync`.
        self._is_averaging: bool | None = None  # As FSDP was told last.
        self._is_in_pass = False
        # The global batch that is under way; whether FSDP keeps gradients of it, those
        # that were averaged, and what they came through.
        self._global_batch: tuple[Loop, int] | None = None
        self._is_kept = False
        self._sums: dict[Tensor, Tensor] = {}
        self._counts_met: set[int | None] = set()

    @property
    def awaits_step(self) -> bool:
        """Whether gradients wait for the step of an optimizer."""
        return any(each.awaits_step for each in self._optimizers)

    def add_optimizer(self, optimizer: Optimizer, *, rates: Rates | None) -> None:
        """Let an optimizer step once, with the gradients of whole global batches."""
        self._optimizers.append(
            OptimizerHooks(
                optimizer, partial=self._nothing_hidden, meter=self._meter, rates=rates
            )
        )

    def prepare(self, *, is_training: bool) -> bool:
        """Prepare a forward pass; return whether it is the last of its global batch."""
        # In case that an exception has left them.
        self._weighing.counts_met, self._is_in_pass = None, False
        self._measuring, loader = None, loader_if_any()
        global_batch = current_global_batch()
        if self._global_batch != global_batch:
            if self._is_kept:
                raise ElasticRunError(_LEFT_UNFINISHED)
            self._global_batch, self._sums, self._counts_met = global_batch, {}, set()
        if loader is None:
            return True
        loop, meter = loader.running_loop, self._meter
        if meter and loader.has_one_weight and meter.measures(loop.current):
            self._measuring = meter
        if is_training:
            for optimizer in self._optimizers:
                optimizer.on_forward(loop)
        return loader.is_step

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, whose gradients will be weighed."""
        output = self._module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        leaves, structure = pytree.tree_flatten(output)
        unknown = [type(leaf) for leaf in leaves if not isinstance(leaf, _PLAIN)]
        if unknown and not any(map(_needs_gradient, leaves)):
            raise TypeError(
                f"{type(self._module).__name__} returned a {unknown[0].__name__}, in "
                "which the tensors cannot be found. With sharded parameters gradients "
                "are weighed at these tensors: return tensors, or tuples, lists or "
                "dictionaries of them, or register the class with torch.utils._pytree."
            )
        return pytree.tree_unflatten([self._entry(leaf) for leaf in leaves], structure)

    def zero_grad(self) -> None:
        """Note that the gradients are about to be zeroed."""
        for optimizer in self._optimizers:
            optimizer.on_zero_grad()

    def unhook(self) -> None:
        """Do nothing: no hooks are at the parameters."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of passes in the block within FSDP, till a later one."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def _entry(self, leaf: Any) -> Any:
        """Return a tensor as it is, for gradients to pass on their way in.

        A hook of the tensor itself would also see what comes from others that were
        returned, and weigh that twice.
        """
        if not _needs_gradient(leaf):
            return leaf
        entry = leaf.view_as(leaf)
        entry.register_hook(self._weigh)
        return entry

    def _weigh(self, gradient: Tensor) -> Tensor | None:
        loader = loader_if_any()
        counts_met = self._weighing.counts_met
        if not self._is_in_pass:
            self._begin_pass(loader, counts_met or {None})
        if loader is None:
            return None
        if counts_met is None:
            return weighed_by(loader.loss_weight, gradient)
        # What comes through a weighed loss was weighed on its way.
        is_padding = loader.running_loop.current.part.num_valid == 0
        return weighed_by(float(not is_padding), gradient)

    def _begin_pass(
        self, loader: LoaderInLoop | None, counts_met: set[int | None]
    ) -> None:
        """Get ready for the first gradient of a backward pass."""
        self._is_in_pass = True
        for optimizer in self._optimizers:
            optimizer.on_backward()
        meter, is_step = self._measuring, loader is None or loader.is_step
        if meter is not None and loader is not None:
            meter.begin_pass(loader.running_loop)
        if not is_step:
            self._counts_met |= counts_met
        is_taken = bool(meter or self._sums or self._counts_met - {None})
        averages = (is_step or is_taken) and not self._is_apart
        if averages != self._is_averaging:
            assert isinstance(self._module, FSDPModule)
            self._module.set_requires_gradient_sync(averages)
            self._is_averaging = averages
        self._is_kept = not averages and not is_step
        before = None
        if is_taken and averages:
            before = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

        def end_pass() -> None:
            self._end_pass(before, is_step=is_step)

        # In two turns, so that FSDP's own callback, which averages, comes before.
        call_after_backward(lambda: call_after_backward(end_pass))

    def _end_pass(self, before: list[Tensor | None] | None, *, is_step: bool) -> None:
        """Take the averaged gradients of a backward pass, if any were to be taken.

        Args:
            before: What the program saw before it, and sees again.
        """
        self._is_in_pass = False
        meter = self._measuring
        if before is not None:
            if is_step:
                self._correct()
            with torch.no_grad():
                for parameter, earlier in zip(self._parameters, before, strict=True):
                    own, parameter.grad = parameter.grad, earlier
                    if own is None and not is_step:
                        continue
                    if meter is not None and own is not None:
                        meter.add(parameter, own)
                    total = _sum(self._sums.pop(parameter, None), own)
                    if is_step:
                        parameter.grad = _sum(earlier, total)
                    elif total is not None:
                        self._sums[parameter] = total
        if meter is not None and is_step:
            meter.end_pass()

    def _correct(self) -> None:
        """Weigh the sums by counts whose own sums were not known yet."""
        if not self._counts_met - {None}:
            return
        factor = torch.as_tensor(self._weighing.correction(self._counts_met))
        self._counts_met = set()
        for gradient in self._sums.values():
            gradient.mul_(float(factor))
        if self._measuring is not None:
            self._measuring.correct(factor)


class _NothingHidden(PartialGradients):
    """Gradients that FSDP keeps for itself until the last micro-batch."""

    def hold_for_step(self, optimizer: Optimizer, *, is_again: bool) -> None:
        del optimizer, is_again


_LEFT_UNFINISHED = (
    "a loop was left between two micro-batches of a global batch, by a break or an "
    "exception, and FSDP keeps the gradients of those that were trained. The next step "
    "would have them, too. Leave the loop where loader.is_step is True, or leave out "
    "max_local_batch_size."
)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
