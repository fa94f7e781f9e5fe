"""Adds up the gradients of micro-batches until the global batch is complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import loader_if_any
from elasticrun.job.loop import Loop, MicroBatch
from elasticrun.parallel.weighing import Weighing


class PartialGradients:
    """Accumulates gradients where the program does not see them, then restores them.

    What stands in for them is zero, so that a program may clip what it finds. It costs
    the memory of the largest parameter only, which all stand-ins share: what is written
    there is thrown away. Sums of a global batch that its loop did not complete are
    dropped.

    Once an optimizer has been asked to step, the partial gradients of its parameters
    are due: they wait for its real step. What comes after that, as from a generator's
    loss that reaches a discriminator, is dropped if it is zeroed. Without a step
    between micro-batches (the loop asks for `is_step` itself) nothing is dropped.

    Args:
        parameters: Those of one module.
        weighing: Knows what hidden gradients are to be corrected by.
        is_reduced: Whether a reduction over replicas follows when the sums are back.

    Attributes:
        hides: Whether any gradient is hidden.
        shown_in: The last micro-batch in which sums were put back.
        counts_met: What the hidden gradients have come through, for `Weighing`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], weighing: Weighing, *, is_reduced: bool
    ) -> None:
        self.hides = False
        self.shown_in: MicroBatch | None = None
        self.counts_met: set[int | None] = set()
        self._parameters = parameters
        self._weighing = weighing
        self._is_reduced = is_reduced
        self._global_batch: tuple[Loop, int] | None = None
        self._due: dict[Tensor, Tensor] = {}
        self._others: dict[Tensor, Tensor] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._stand_ins: dict[Tensor, Tensor] = {}

    def hide_all(self) -> None:
        """Move the gradients of all parameters out of `.grad`."""
        self.drop_abandoned()
        for zeros in self._zeros.values():
            zeros.zero_()  # Whatever the program has made of them.
        for parameter in self._parameters:
            self.hide(parameter, is_own=False)

    def hide(self, parameter: Tensor, *, is_own: bool = True) -> None:
        """Move the gradient of a parameter out of `.grad`.

        Args:
            is_own: Its memory is nobody else's; it might be a view of DDP's.
        """
        gradient = parameter.grad
        if gradient is None or self._is_stand_in(parameter):
            return
        self._global_batch = current_global_batch()
        self.hides = True
        parameter.grad = self._stand_in(parameter, gradient)
        gradient = gradient.detach()
        _add(self._others, parameter, gradient if is_own else gradient.clone())

    def make_room(self, parameter: Tensor) -> None:
        """Move the gradient out of `.grad`, before another one is added."""
        self.hide(parameter, is_own=False)
        parameter.grad = None

    def show(self) -> Tensor | None:
        """Move the accumulated gradients back into `.grad`.

        Returns:
            What they were multiplied with, if with anything.
        """
        correction = None
        self.drop_abandoned()
        if self.hides:
            correction = self._correct()
            for hidden in (self._due, self._others):
                for parameter, gradient in hidden.items():
                    self._show_one(parameter, gradient)
            self._due, self._others = {}, {}
            self.hides, self.shown_in = False, _current_micro_batch()
        self.counts_met = set()
        return correction

    def show_before_step(self) -> None:
        """Put back what no gradient has met before the step."""
        self.drop_abandoned()
        if self.hides and self._is_reduced:
            raise ElasticRunError(
                "an optimizer stepped at the last micro-batch of a global batch, but "
                "that one had no backward pass through the model, which would also "
                "average the gradients of the earlier ones over the replicas. Call "
                "backward() in each micro-batch; to leave out a loss, multiply it by 0."
            )
        self.show()

    def make_due(self, optimizer: Optimizer, *, is_again: bool) -> None:
        """Keep what the optimizer would step with now until it really steps."""
        self.drop_abandoned()
        for parameter in parameters_of(optimizer):
            self.hide(parameter, is_own=False)
            gradient = self._others.pop(parameter, None)
            if gradient is None:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. With max_local_batch_size there is one step for a "
                    "global batch, at its last micro-batch. Step once in each "
                    "iteration of the loop, or leave out max_local_batch_size."
                )
            _add(self._due, parameter, gradient)

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Drop what has come to parameters since their gradients became due."""
        for parameter in parameters:
            if parameter in self._due:
                self._others.pop(parameter, None)

    def drop_abandoned(self) -> None:
        """Drop what is left of a global batch that its loop did not complete."""
        if self.hides and self._global_batch != current_global_batch():
            for parameter in self._stand_ins:
                if self._is_stand_in(parameter):
                    parameter.grad = None
            self._due, self._others, self.hides = {}, {}, False
            self.counts_met = set()

    def _correct(self) -> Tensor | None:
        """Weigh what is hidden by counts whose sums were not known yet."""
        if not self.counts_met - {None}:
            return None
        factor = torch.as_tensor(self._weighing.correction(self.counts_met))
        for hidden in (self._due, self._others):
            for gradient in hidden.values():
                gradient.mul_(factor.to(gradient))
        return factor

    def _show_one(self, parameter: Tensor, gradient: Tensor) -> None:
        previous = None if self._is_stand_in(parameter) else parameter.grad
        with torch.no_grad():
            parameter.grad = gradient if previous is None else _sum(previous, gradient)

    def _is_stand_in(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        return gradient is not None and gradient is self._stand_ins.get(parameter)

    def _stand_in(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Return zeros for the program to find; None in place of a sparse gradient."""
        if gradient.is_sparse:
            return None
        stand_in = self._stand_ins.get(parameter)
        kind = gradient.dtype, gradient.device
        if stand_in is None or (stand_in.dtype, stand_in.device) != kind:
            zeros = self._zeros.get(kind)
            if zeros is None:
                zeros = self._zeros[kind] = gradient.new_zeros(
                    max(each.numel() for each in self._parameters)
                )
            stand_in = zeros[: gradient.numel()].view(gradient.shape)
            self._stand_ins[parameter] = stand_in
        return stand_in


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    previous = sums.get(parameter)
    sums[parameter] = gradient if previous is None else _sum(previous, gradient)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where that is dense."""
    return second + first if first.is_sparse else first.add_(second)


def loop_if_any() -> Loop | None:
    """Return the loop that is running, None outside of loops."""
    loader = loader_if_any()
    return None if loader is None else loader.running_loop


def _current_micro_batch() -> MicroBatch | None:
    loop = loop_if_any()
    return None if loop is None else loop.current


def current_global_batch() -> tuple[Loop, int] | None:
    """Return what equals itself in one global batch only, or None outside of loops."""
    loop = loop_if_any()
    return None if loop is None else (loop, loop.current.number)
