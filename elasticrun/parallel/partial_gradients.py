"""The gradients of a module while their global batch is incomplete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.current import running_loader
from elasticrun.parallel.weighing import Weighing


class PartialGradients:
    """Takes gradients out of the program's sight, and puts their sums back.

    What stands in for them is zero, so that a program may clip what it finds. It costs
    the memory of the largest parameter only, which all stand-ins share: what is written
    there is thrown away. Sums of a global batch that its loop did not complete are
    dropped.

    A program may accumulate what no step is to see: in a GAN the generator's loss
    reaches the discriminator, which is zeroed before its own loss. So partial gradients
    are fresh until an optimizer steps; then they are due, and what `zero_grad` had
    taken from the fresh ones is dropped. Due ones stay until the optimizer has really
    stepped. Without a step between micro-batches (the loop asks for `is_step` itself)
    nothing is dropped.

    Args:
        parameters: Those of one module.
        is_reduced: Whether a reduction over replicas follows when the sums are back.

    Attributes:
        hides: Whether any gradient is hidden.
        counts_met: What the hidden gradients have come through, for `Weighing`.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_reduced: bool) -> None:
        self.hides = False
        self.counts_met: set[int | None] = set()
        self._parameters = parameters
        self._is_reduced = is_reduced
        self._global_batch: object = None
        self._stepped: set[Tensor] = set()  # Those of a known optimizer.
        self._fresh: dict[Tensor, Tensor] = {}
        self._zeroed: dict[Tensor, Tensor] = {}
        self._due: dict[Tensor, Tensor] = {}
        self._shown: set[Tensor] = set()  # Due ones that `.grad` contains.
        self._has_strays = False  # Whether a step is not to see all, as in a GAN.
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._stand_ins: dict[Tensor, Tensor] = {}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Expect that the optimizer's steps and zeroing will be told."""
        self._stepped.update(parameters_of(optimizer))

    def hide_all(self) -> None:
        """Take away what `.grad` of all parameters holds."""
        for zeros in self._zeros.values():
            zeros.zero_()  # Whatever the program has made of them.
        for parameter in self._parameters:
            self.hide(parameter, is_own=False)

    def hide(self, parameter: Tensor, *, is_own: bool = True) -> None:
        """Take away what `.grad` holds.

        Args:
            is_own: Its memory is nobody else's; it might be a view of DDP's.
        """
        gradient = parameter.grad
        if gradient is None or self._is_stand_in(parameter):
            return
        self.drop_abandoned()
        self._global_batch = _running_global_batch()
        self.hides = True
        parameter.grad = self._stand_in(parameter, gradient)
        gradient = gradient.detach()
        _add(self._fresh, parameter, gradient if is_own else gradient.clone())

    def make_room(self, parameter: Tensor) -> None:
        """Take away what `.grad` holds, before a gradient is added."""
        self.hide(parameter, is_own=False)
        parameter.grad = None

    def correct(self, weighing: Weighing) -> None:
        """Weigh what is hidden by counts whose sums were not known yet."""
        self.drop_abandoned()
        if self.counts_met - {None}:
            factor = torch.as_tensor(weighing.correction(self.counts_met))
            for hidden in (self._fresh, self._zeroed, self._due):
                for gradient in hidden.values():
                    gradient.mul_(factor.to(gradient))
        self.counts_met = set()

    def show(self) -> None:
        """Put what is hidden back where the step looks for it."""
        self.drop_abandoned()
        if not self._has_hidden():
            return
        for hidden in (self._zeroed, self._fresh):
            for parameter, gradient in hidden.items():
                self._show_one(parameter, gradient)
        for parameter, gradient in self._due.items():
            if parameter not in self._shown:
                keep = gradient.clone() if self._has_strays else gradient
                self._show_one(parameter, keep)
        self._fresh, self._zeroed = {}, {}
        if self._has_strays:  # It may be zeroed with them, and then be due once more.
            self._shown = set(self._due)
        else:
            self._due, self.hides = {}, False

    def show_the_rest(self) -> None:
        """Put back what no gradient has met before the step.

        Raises:
            ElasticRunError: It would have to be reduced.
        """
        self.drop_abandoned()
        if not self._has_hidden():
            return
        if self._is_reduced:
            raise ElasticRunError(
                "an optimizer stepped at the last micro-batch of a global batch, but "
                "that had no backward pass through the model, in which the gradients "
                "of the earlier ones are reduced over the replicas. Let each "
                "micro-batch have one; a loss to leave out can be multiplied with 0."
            )
        self.show()

    def make_due(self, optimizer: Optimizer, *, is_again: bool) -> None:
        """Keep what the optimizer would step with now until it really steps.

        Raises:
            ElasticRunError: It has done so in this micro-batch (`is_again`).
        """
        self.add_optimizer(optimizer)  # It may have more groups by now.
        for parameter in parameters_of(optimizer):
            if self._zeroed.pop(parameter, None) is not None:
                self._has_strays = True
            self.hide(parameter, is_own=False)
            gradient = self._fresh.pop(parameter, None)
            if gradient is None:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. A global batch is one step, taken at its last "
                    "micro-batch, and gradients for another would have to be computed "
                    "after that. Leave out max_local_batch_size, or step once in each "
                    "turn of the loop."
                )
            _add(self._due, parameter, gradient)

    def drop_due(self, optimizer: Optimizer) -> None:
        """Forget what the optimizer has stepped with."""
        for parameter in parameters_of(optimizer):
            self._due.pop(parameter, None)
            self._shown.discard(parameter)
        self.hides = bool(self._fresh or self._zeroed or self._due)

    def zero(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Take fresh gradients for zeroed; without parameters, those of optimizers."""
        if not self._fresh and not self._shown:
            return
        for parameter in self._stepped if parameters is None else parameters:
            self._shown.discard(parameter)
            gradient = self._fresh.pop(parameter, None)
            if gradient is None:
                continue
            if parameter in self._due:
                self._has_strays = True
            else:
                _add(self._zeroed, parameter, gradient)

    def drop_abandoned(self) -> None:
        """Drop what is left of a global batch that its loop did not complete."""
        if self.hides and self._global_batch != _running_global_batch():
            for parameter in self._stand_ins:
                if self._is_stand_in(parameter):
                    parameter.grad = None
            self._fresh, self._zeroed, self._due = {}, {}, {}
            self._shown, self.hides = set(), False
            self.counts_met = set()

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

    def _show_one(self, parameter: Tensor, gradient: Tensor) -> None:
        previous = None if self._is_stand_in(parameter) else parameter.grad
        with torch.no_grad():
            parameter.grad = gradient if previous is None else _sum(previous, gradient)

    def _has_hidden(self) -> bool:
        has_others = bool(self._fresh or self._zeroed)
        return has_others or len(self._due) > len(self._shown)


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    previous = sums.get(parameter)
    sums[parameter] = gradient if previous is None else _sum(previous, gradient)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where that is dense."""
    return second + first if first.is_sparse else first.add_(second)


def _running_global_batch() -> object:
    """Return what equals itself in one global batch only, or None outside of loops."""
    loader = running_loader()
    if loader is None:
        return None
    return loader.running_loop, loader.running_loop.current[0]
