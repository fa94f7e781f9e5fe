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
from elasticrun.parallel.tree import TreeSum, add_to
from elasticrun.parallel.virtual import VirtualReduction
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

    With virtual replicas gradients are hidden in the last micro-batch, too, and what is
    shown after its backward pass is the mean over the shares of all processes. After a
    second pass it is computed anew, until the optimizer has stepped. What `.grad` held
    before the global batch is put aside, and added to it.

    Args:
        parameters: Those of one module.
        weighing: Knows what hidden gradients are to be corrected by.
        is_reduced: Whether a reduction over replicas follows when the sums are back.
        virtual: Reduces those of virtual replicas.

    Attributes:
        hides: Whether any gradient is hidden.
        shown_in: The last micro-batch in which sums were put back.
        stepped_in: The last one in which an optimizer stepped, with virtual replicas.
        counts_met: What the hidden gradients have come through, for `Weighing`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        weighing: Weighing,
        *,
        is_reduced: bool,
        virtual: VirtualReduction | None = None,
    ) -> None:
        self.hides = False
        self.shown_in: MicroBatch | None = None
        self.stepped_in: MicroBatch | None = None
        self.counts_met: set[int | None] = set()
        self._parameters = parameters
        self._weighing = weighing
        self._is_reduced = is_reduced or virtual is not None
        self._virtual = virtual
        self._global_batch: tuple[Loop, int] | None = None
        # By shares; without virtual replicas there is one for all micro-batches.
        self._due: dict[Tensor, TreeSum] = {}
        self._others: dict[Tensor, TreeSum] = {}
        # With them: what was there before, and what is shown, with its version.
        self._aside: dict[Tensor, Tensor] = {}
        self._aside_due: set[Tensor] = set()  # Of what there is aside, by `make_due`.
        self._shown: dict[Tensor, tuple[Tensor, int]] = {}
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
        if not is_own:
            gradient = gradient.clone()
        if self._virtual is None:
            self._others.setdefault(parameter, TreeSum()).add(0, gradient)
        elif is_own:
            self._add_share(parameter, gradient, self._virtual)
        elif parameter not in self._shown:  # Else its mean is computed anew.
            self._aside[parameter] = gradient

    def _add_share(
        self, parameter: Tensor, gradient: Tensor, virtual: VirtualReduction
    ) -> None:
        share = _current_share()
        if gradient.is_sparse:
            raise ElasticRunError(
                "an embedding has sparse gradients (sparse=True), which are not added "
                "up in a job with virtual_replicas. Make it with sparse=False."
            )
        if share >= 0:  # A process that has none of the batch adds nothing, not even 0.
            tree = self._others.setdefault(parameter, virtual.tree.new_sum())
            tree.add(share, gradient)

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
                for parameter, tree in hidden.items():
                    self._show_one(parameter, tree.total())
            self._due, self._others = {}, {}
            self.hides, self.shown_in = False, current_micro_batch()
        self.counts_met = set()
        return correction

    def show_means(self, virtual: VirtualReduction) -> None:
        """Put the mean gradients over all shares into `.grad`. Collective."""
        means = virtual.means(self.sum_of)
        if self.counts_met - {None}:
            factor = torch.as_tensor(self._weighing.correction(self.counts_met))
            for each in means.values():
                each.mul_(factor.to(each))
        for parameter in self._parameters:
            mean, aside = means.get(parameter), self._aside.get(parameter)
            # In an earlier share it may have been zeroed behind the step.
            is_zeroed = parameter.grad is None and parameter in self._aside_due
            if mean is None and (is_zeroed or self._is_stand_in(parameter)):
                parameter.grad = aside
                self._aside_due.discard(parameter)
            elif mean is not None:
                parameter.grad = mean if aside is None else mean.add_(aside)
                self._shown[parameter] = mean, mean._version
        self.hides, self.shown_in = False, current_micro_batch()

    def sum_of(self, parameter: Tensor) -> TreeSum | None:
        """Return what the step is to have of a parameter's gradient, if anything."""
        due, others = self._due.get(parameter), self._others.get(parameter)
        if due is None or others is None:
            return others if due is None else due
        return due.plus(*_one_of(others))

    def check_shown(self) -> None:
        """Refuse another backward pass when the mean gradients have been changed."""
        if self._global_batch != current_global_batch():
            return
        for parameter, (mean, version) in self._shown.items():
            if parameter.grad is not mean or mean._version != version:
                raise ElasticRunError(
                    "gradients were changed (clipped, unscaled or zeroed) between two "
                    "backward passes in one global batch, without a step. With "
                    "virtual_replicas they are the mean over the shares of the batch, "
                    "which a later backward pass computes anew. Change them once, "
                    "between the last backward pass and the step. If the loss of "
                    "another module goes through this one, freeze this one meanwhile "
                    "(requires_grad_(False)), and step at the end of the iteration."
                )

    def note_stepped(self, optimizer: Optimizer) -> None:
        """Forget what the optimizer has stepped with."""
        if self._virtual is not None:
            self.stepped_in = current_micro_batch()
            for parameter in parameters_of(optimizer):
                for kept in (self._due, self._others, self._aside, self._shown):
                    kept.pop(parameter, None)
                self._aside_due.discard(parameter)

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
            if self._is_stand_in(parameter) and parameter in self._aside:
                self._aside_due.add(parameter)
            elif parameter not in self._aside_due:  # Zeroed before the step.
                self._aside.pop(parameter, None)
            if parameter not in self._others:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. With max_local_batch_size there is one step for a "
                    "global batch, at its last micro-batch. Step once in each "
                    "iteration of the loop, or leave out max_local_batch_size."
                )
            self._make_one_due(parameter)

    def _make_one_due(self, parameter: Tensor) -> None:
        others = self._others.pop(parameter)
        due = self._due.setdefault(parameter, others)
        if due is not others:
            due.add(*_one_of(others))

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Drop what has come to parameters since their gradients became due."""
        for parameter in parameters:
            if parameter in self._due:
                self._others.pop(parameter, None)

    def drop_abandoned(self) -> None:
        """Drop what is left of a global batch that its loop did not complete."""
        if self._global_batch == current_global_batch():
            return
        self._due, self._others, self._aside, self._shown = {}, {}, {}, {}
        self._aside_due, self.counts_met = set(), set()
        if self.hides:
            for parameter in self._stand_ins:
                if self._is_stand_in(parameter):
                    parameter.grad = None
            self.hides = False

    def _correct(self) -> Tensor | None:
        """Weigh what is hidden by counts whose sums were not known yet."""
        if not self.counts_met - {None}:
            return None
        factor = torch.as_tensor(self._weighing.correction(self.counts_met))
        for tree in (*self._due.values(), *self._others.values()):
            for _, gradient in tree.nodes:
                gradient.mul_(factor.to(gradient))
        return factor

    def _show_one(self, parameter: Tensor, gradient: Tensor) -> None:
        previous = None if self._is_stand_in(parameter) else parameter.grad
        with torch.no_grad():
            parameter.grad = (
                gradient if previous is None else add_to(previous, gradient)
            )

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


def loop_if_any() -> Loop | None:
    """Return the loop that is running, None outside of loops."""
    loader = loader_if_any()
    return None if loader is None else loader.running_loop


def current_micro_batch() -> MicroBatch | None:
    """Return the micro-batch that is trained now, None outside of loops."""
    loop = loop_if_any()
    return None if loop is None else loop.current


def _one_of(others: TreeSum) -> tuple[int, Tensor]:
    """Return what the running share has given since the last step."""
    (found, *more) = others.nodes
    if more or found[0] != max(_current_share(), 0):
        raise ElasticRunError(
            "gradients of an earlier share of the global batch came after a step, and "
            "were neither zeroed nor stepped with. With virtual_replicas it cannot be "
            "told in which order they are to be added. Call zero_grad in each "
            "iteration of the loop, or step in each."
        )
    return found


def _current_share() -> int:
    micro_batch = current_micro_batch()
    return 0 if micro_batch is None else micro_batch.part.share


def current_global_batch() -> tuple[Loop, int] | None:
    """Return what equals itself in one global batch only, or None outside of loops."""
    loop = loop_if_any()
    return None if loop is None else (loop, loop.current.number)
