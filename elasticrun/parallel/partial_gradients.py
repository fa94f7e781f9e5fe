"""Adds up the gradients of micro-batches until the global batch is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


class HeldGradient:
    """What is out of sight of one parameter's gradient.

    Attributes:
        number: Of the parameter in its module.
        due: What the optimizer has asked to step with, by shares; without virtual
            replicas there is one for all micro-batches.
        others: What has come since.
        is_hidden: Whether any of it is, with virtual replicas.
        aside: What was there before the global batch, with virtual replicas.
        is_aside_due: Whether the optimizer has asked to step with that, too.
        shown: The mean over all shares that stands in `.grad`, and its version.
        spare: Memory for the sums of shares to come, with virtual replicas. Given back
            in each batch and asked for anew, it would cost page faults in each.
    """

    __slots__ = (
        *("number", "parameter", "stand_in", "due", "others", "aside"),
        *("is_hidden", "is_aside_due", "shown", "spare"),
    )

    def __init__(self, number: int, parameter: Tensor) -> None:
        self.number = number
        self.parameter = parameter
        self.stand_in: Tensor | None = None  # The zeros that the program finds.
        self.spare: list[Tensor] = []
        self.forget()

    def forget(self) -> None:
        """Forget all of it."""
        self.due: TreeSum | None = None
        self.others: TreeSum | None = None
        self.is_hidden = False
        self.aside: Tensor | None = None
        self.is_aside_due = False
        self.shown: tuple[Tensor, int] | None = None

    def forget_stepped(self) -> None:
        """Forget what the optimizer has stepped with, but for some of the memory."""
        if tree := self.due or self.others:
            # All but the last share's gradient, which it had no need of until then.
            self.spare = [each for _, each in tree.nodes[:-1]]
        self.forget()

    def in_spare_memory(self, gradient: Tensor) -> Tensor:
        """Return a gradient of a share, in spare memory if there is any like it."""
        if not self.spare:
            return gradient
        spare = self.spare.pop()
        kind = gradient.shape, gradient.dtype, gradient.device
        is_alike = (spare.shape, spare.dtype, spare.device) == kind
        return spare.copy_(gradient) if is_alike else gradient

    @property
    def has_stand_in(self) -> bool:
        """Whether the program finds the stand-in."""
        gradient = self.parameter.grad
        return gradient is not None and gradient is self.stand_in


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
    before the global batch is put aside, and added to it. There autograd adds each
    pass's gradients in `.grad` as ever, which is empty before and emptied after it.

    Args:
        parameters: Those of one module.
        weighing: Knows what hidden gradients are to be corrected by.
        is_reduced: Whether a reduction over replicas follows when the sums are back.
        virtual: Reduces those of virtual replicas.

    Attributes:
        held: For each parameter, what is hidden of its gradient.
        has_hidden: Whether any gradient is hidden.
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
        self.held = [HeldGradient(n, each) for n, each in enumerate(parameters)]
        self.has_hidden = False
        self.shown_in: MicroBatch | None = None
        self.stepped_in: MicroBatch | None = None
        self.counts_met: set[int | None] = set()
        self._held_of = {id(each.parameter): each for each in self.held}
        self._weighing = weighing
        self._is_reduced = is_reduced or virtual is not None
        self._virtual = virtual
        self._global_batch: tuple[Loop, int] | None = None
        self._is_in_pass = False  # With virtual replicas, as what follows.
        self._share = 0  # Of the pass.
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def hide_all(self) -> None:
        """Move the gradients of all parameters out of `.grad`."""
        self.drop_abandoned()
        for zeros in self._zeros.values():
            zeros.zero_()  # Whatever the program has made of them.
        for each in self.held:
            self.hide(each, is_own=False)

    def hide(self, held: HeldGradient, *, is_own: bool = True) -> None:
        """Move the gradient of a parameter out of `.grad`.

        Args:
            is_own: Its memory is nobody else's; it might be a view of DDP's.
        """
        gradient = held.parameter.grad
        if gradient is None or gradient is held.stand_in:
            return
        self.has_hidden = True
        held.parameter.grad = self._stand_in(held, gradient)
        gradient = gradient.detach()
        if not is_own:
            gradient = gradient.clone()
        if self._virtual is None:
            held.others = held.others or TreeSum()
            held.others.add(0, gradient)
        elif held.shown is None:  # Else its mean is computed anew.
            held.aside = gradient

    def begin_pass(self) -> None:
        """Empty `.grad` for a backward pass of a share."""
        for each in self.held:
            if self._is_in_pass:  # The last one was left by an exception.
                each.parameter.grad = None
            self.hide(each, is_own=False)
            each.is_hidden = each.parameter.grad is not None
            each.parameter.grad = None
        self._is_in_pass, self._share = True, _current_share()

    def take(self, held: HeldGradient) -> None:
        """Add what has come in a share to its sum."""
        gradient, virtual = held.parameter.grad, self._virtual
        if gradient is None or virtual is None:
            return
        held.parameter.grad = None
        self.has_hidden = held.is_hidden = True
        gradient = gradient.detach()
        if gradient.is_sparse:
            raise ElasticRunError(
                "an embedding has sparse gradients (sparse=True), which are not added "
                "up in a job with virtual_replicas. Make it with sparse=False."
            )
        # A process that has none of the batch adds nothing, not even 0.
        if self._share >= 0:
            held.others = held.others or virtual.tree.new_sum(held.spare)
            held.others.add(self._share, held.in_spare_memory(gradient))

    def end_pass(self) -> None:
        """Hide what has come in a share; others are to come."""
        self._is_in_pass = False
        for each in self.held:
            self.take(each)
            if each.is_hidden:
                each.parameter.grad = self._stand_in(each, each.parameter)

    def make_room(self, held: HeldGradient) -> None:
        """Move the gradient out of `.grad`, before another one is added."""
        self.hide(held, is_own=False)
        held.parameter.grad = None

    def show(self) -> Tensor | None:
        """Move the accumulated gradients back into `.grad`.

        Returns:
            What they were multiplied with, if with anything.
        """
        correction = None
        self.drop_abandoned()
        if self.has_hidden:
            correction = self._correct()
            for each in self.held:
                for tree in (each.due, each.others):
                    if tree is not None:
                        _show_one(each, tree.nodes[0][1])
                each.due = each.others = None
            self.has_hidden, self.shown_in = False, current_micro_batch()
        self.counts_met = set()
        return correction

    def show_means(self, virtual: VirtualReduction) -> None:
        """Put the mean gradients over all shares into `.grad`. Collective."""
        means = virtual.means(self.sum_of)
        self._is_in_pass = False
        if self.counts_met - {None}:
            factor = torch.as_tensor(self._weighing.correction(self.counts_met))
            for mean in means.values():
                mean.mul_(factor.to(mean))
        for each in self.held:
            if (found := means.get(each.number)) is not None:
                mean = found if each.aside is None else found.add_(each.aside)
                each.parameter.grad = mean
                each.shown = mean, mean._version
            # In an earlier share it may have been zeroed behind the step.
            elif each.is_hidden or each.is_aside_due:
                each.parameter.grad = each.aside
                each.is_aside_due = False
        self.has_hidden, self.shown_in = False, current_micro_batch()

    def sum_of(self, number: int) -> TreeSum | None:
        """Return what the step is to have of a gradient, if it has come."""
        held = self.held[number]
        if self._is_in_pass:
            self.take(held)
        if held.due is None or held.others is None:
            return held.others if held.due is None else held.due
        return held.due.plus(*_one_of(held.others))

    def check_shown(self) -> None:
        """Refuse another backward pass when the mean gradients have been changed."""
        if self._global_batch != current_global_batch():
            return
        for each in self.held:
            if each.shown is None:
                continue
            mean, version = each.shown
            if each.parameter.grad is not mean or mean._version != version:
                raise ElasticRunError(
                    "gradients were changed (clipped, unscaled or zeroed) between two "
                    "backward passes in one global batch, without a step. With "
                    "virtual_replicas they are the mean over the shares of the batch, "
                    "which a later backward pass computes anew. Change them once, "
                    "between the last backward pass and the step. If the loss of "
                    "another module goes through this one, freeze this one meanwhile "
                    "(requires_grad_(False)), and step at the end of the iteration."
                )

    def check_reduced(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no backward pass has brought, with virtual replicas."""
        if self.shown_in is current_micro_batch():
            return
        held = self._of(parameters_of(optimizer))
        if any(h.parameter.grad is not None and not h.has_stand_in for h in held):
            raise ElasticRunError(
                f"{type(optimizer).__name__}.step() came to gradients that no backward "
                "pass of this iteration has brought, such as torch.autograd.grad's, in "
                "a job with virtual_replicas. They are those of a share, and not added "
                "up over all shares. Let loss.backward() bring them, and change them "
                "behind it, or leave virtual_replicas out."
            )

    def forget_stepped(self, optimizer: Optimizer) -> None:
        """Forget what the optimizer has stepped with."""
        if self._virtual is not None:
            self.stepped_in = current_micro_batch()
            for held in self._of(parameters_of(optimizer)):
                held.forget_stepped()

    def show_before_step(self) -> None:
        """Put back what no gradient has met before the step."""
        self.drop_abandoned()
        if self.has_hidden and self._is_reduced:
            raise ElasticRunError(
                "an optimizer stepped at the last micro-batch of a global batch, but "
                "that one had no backward pass through the model, which would also "
                "average the gradients of the earlier ones over the replicas. Call "
                "backward() in each micro-batch; to leave out a loss, multiply it by 0."
            )
        self.show()

    def hold_for_step(self, optimizer: Optimizer, *, is_again: bool) -> None:
        """Keep what the optimizer would step with now until it really steps."""
        self.drop_abandoned()
        for held in self._of(parameters_of(optimizer)):
            self.hide(held, is_own=False)
            if held.has_stand_in and held.aside is not None:
                held.is_aside_due = True
            elif not held.is_aside_due:  # Zeroed before the step.
                held.aside = None
            if held.others is None:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. With max_local_batch_size there is one step for a "
                    "global batch, at its last micro-batch. Step once in each "
                    "iteration of the loop, or leave out max_local_batch_size."
                )
            if held.due is None:
                held.due = held.others
            else:
                held.due.add(*_one_of(held.others))
            held.others = None

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Drop what has come to parameters since their gradients became due."""
        for held in self._of(parameters):
            if held.due is not None:
                held.others = None

    def drop_abandoned(self) -> None:
        """Drop what is left of a global batch that its loop did not complete."""
        global_batch = current_global_batch()
        if self._global_batch == global_batch:
            return
        self._global_batch = global_batch
        self.counts_met = set()
        for each in self.held if self.has_hidden or self._virtual else ():
            each.forget()
            if self._is_in_pass or (self.has_hidden and each.has_stand_in):
                each.parameter.grad = None
        self.has_hidden = self._is_in_pass = False
        if self._virtual is not None:
            self._virtual.tree.begin_batch()

    def _of(self, parameters: Iterable[Tensor]) -> Iterator[HeldGradient]:
        """Yield what is held of those parameters that are the module's."""
        for parameter in parameters:
            if (held := self._held_of.get(id(parameter))) is not None:
                yield held

    def _correct(self) -> Tensor | None:
        """Weigh what is hidden by counts whose sums were not known yet."""
        if not self.counts_met - {None}:
            return None
        factor = torch.as_tensor(self._weighing.correction(self.counts_met))
        for each in self.held:
            for tree in (each.due, each.others):
                for _, gradient in [] if tree is None else tree.nodes:
                    gradient.mul_(factor.to(gradient))
        return factor

    def _stand_in(self, held: HeldGradient, gradient: Tensor) -> Tensor | None:
        """Return zeros for the program to find; None in place of a sparse gradient."""
        if gradient.is_sparse:
            return None
        stand_in = held.stand_in
        kind = gradient.dtype, gradient.device
        if stand_in is None or (stand_in.dtype, stand_in.device) != kind:
            zeros = self._zeros.get(kind)
            if zeros is None:
                zeros = self._zeros[kind] = gradient.new_zeros(
                    max(each.parameter.numel() for each in self.held)
                )
            stand_in = zeros[: gradient.numel()].view(gradient.shape)
            held.stand_in = stand_in
        return stand_in


def _show_one(held: HeldGradient, gradient: Tensor) -> None:
    previous = None if held.has_stand_in else held.parameter.grad
    with torch.no_grad():
        held.parameter.grad = (
            gradient if previous is None else add_to(previous, gradient)
        )


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
