"""Weighs losses by how many samples they average, as the backward pass begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticrun.errors import ElasticRunError, frame_of_program
from elasticrun.job.current import loader_if_any
from elasticrun.job.in_step import InStep
from elasticrun.job.loop import LoaderInLoop, MicroBatchInfo
from elasticrun.job.open_loop import line_of

Factor = Callable[[], Tensor | float]


class Weighing:
    """Weighs losses by what they are means over; one for all models of a job.

    The weight of a mean over c of C things, of which the others have the rest, is c / C
    (times the world size, by which DDP divides). C is the sum of a number that each
    replica gives; it is asked for when the loss is weighed, and waited for in the
    backward pass. In a global batch that is cut into micro-batches C is known at the
    last one only: until then losses are weighed as if it were the number of samples,
    and what has been accumulated is corrected in one go before the last is added. With
    virtual replicas all of it is, by counts that are added in the order of shares.

    Collective: make it on every replica.

    Args:
        world_size: Of the job.
        in_step: Notices that another replica gives no count.
        timeout: Seconds that a sum may take; None for torch's own.
        num_virtual: Virtual replicas, if there are any.

    Attributes:
        counts_met: What the backward pass under way has come through: the numbers of
            counts whose sums are not known yet, None for losses of which nothing is to
            be corrected. Itself None in a pass that has come through no weighed loss.
        group: Of all processes, for numbers; None for one alone.
    """

    def __init__(
        self,
        world_size: int,
        in_step: InStep,
        timeout: float | None = None,
        num_virtual: int | None = None,
    ) -> None:
        self.counts_met: set[int | None] | None = None
        self._world_size = num_virtual or world_size
        self._in_step = in_step
        # A group of its own: a count that one replica alone gives must not meet DDP's
        # gradients, at which gloo would abort the processes.
        self.group: Any = None
        self._num_virtual = num_virtual
        if world_size > 1:
            limit = None if timeout is None else timedelta(seconds=timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self._micro_batch: object = None
        self._global_batch: object = None
        self._num_counts = 0  # Of the losses weighed by a count in this micro-batch.
        self._sums: dict[int, Tensor] = {}  # Of this replica's counts, by their number.
        self._totals: dict[int, _Total] = {}
        self._num_samples = 0

    def weigh(
        self,
        loss: Tensor,
        count: Tensor | float | None,
        reduction: str,
        member: LoaderInLoop | None,
    ) -> Any:
        """Return the loss, whose gradients will be weighed; see the model's method."""
        _check(count, reduction)
        # A constant one, of which nothing was counted here, gives its 0 all the same.
        is_constant = not loss.requires_grad
        if is_constant and (count is None or not torch.is_grad_enabled()):
            return loss
        loader = loader_if_any()
        if member is not None:
            _check_member(member, loader)
        if self._world_size == 1 and (loader is None or _is_all(loader)):
            return loss
        factor, number = self._factor(loss, count, reduction, loader, member or loader)
        weigh: Any = _Weigh.apply
        return weigh(loss, self, factor, number)

    def meet(self, number: int | None) -> None:
        """Remember that the backward pass has come through a weighed loss.

        Args:
            number: Of the count by which it was weighed, if its sum is not known yet.
        """
        if self.counts_met is None:
            self.counts_met = set()
            call_after_backward(self.end_pass)
        self.counts_met.add(number)

    def end_pass(self) -> None:
        """Forget the backward pass that has ended, or was left by an exception."""
        self.counts_met = None

    def correction(self, counts_met: Iterable[int | None]) -> Tensor | float:
        """Return what to multiply with what came through counts in micro-batches."""
        first, *others = [self._correction_of(number) for number in counts_met]
        if any(bool(each != first) for each in others):
            raise ElasticRunError(
                "losses that are means over different counts, or over samples and a "
                "count, were weighed in one global batch, which max_local_batch_size "
                "or virtual_replicas cuts into micro-batches. Their gradients are "
                "added up before the total counts are known, so they can be divided "
                "by only one number. Use one count for all losses, or leave out what "
                "cuts the batch."
            )
        return first

    def _factor(
        self,
        loss: Tensor,
        count: Tensor | float | None,
        reduction: str,
        loader: LoaderInLoop | None,
        member: LoaderInLoop | None,
    ) -> tuple[Factor, int | None]:
        """Return what to multiply gradients with, and the number of the count.

        Args:
            member: Whose samples the loss is over: the loader, or a member of it.
        """
        world_size = self._world_size
        weight, is_padding, part = 1.0, False, None
        if loader is not None and member is not None:
            weight = member.loss_weight  # Raises if the members' losses differ.
            is_padding = member.running_loop.current.part.num_valid == 0
            part = loader.running_loop.current.part
        if reduction == "sum":
            sum_weight = 0.0 if is_padding else float(world_size)
            return lambda: sum_weight, None
        if count is None:
            return lambda: weight, None
        own = torch.as_tensor(count, dtype=torch.float64, device=loss.device)
        own = torch.zeros_like(own) if is_padding else own.detach()
        is_whole = part is None or (_is_whole(part) and not self._num_virtual)
        if loader is None or part is None or is_whole:
            total = self._total(own)
            return lambda: total.share_of(own), None
        number = self._number(loader)
        counted = own
        if self._num_virtual:  # A place for each share.
            counted = own.new_zeros(self._num_virtual)
            counted[max(part.share, 0)] = own
        self._sums[number] = self._sums.get(number, 0) + counted
        if part.is_step:
            total = self._totals[number] = self._total(self._sums[number])
            if not self._num_virtual:
                return lambda: total.share_of(own), None
        scale = world_size / part.global_batch_size
        return lambda: own * scale, number

    def _total(self, own: Tensor) -> _Total:
        frame = frame_of_program(sys._getframe())
        place = "an unknown line" if frame is None else line_of(frame)
        return _Total(own, self._world_size, self.group, self._in_step, place)

    def _number(self, loader: LoaderInLoop) -> int:
        """Return which one of its micro-batch's counts this is."""
        loop = loader.running_loop
        if self._micro_batch is not loop.current:
            self._micro_batch, self._num_counts = loop.current, 0
        if self._global_batch != (loop, loop.current.number):
            self._global_batch = (loop, loop.current.number)
            self._num_samples = loop.current.part.global_batch_size
            self._sums, self._totals = {}, {}
        self._num_counts += 1
        return self._num_counts - 1

    def _correction_of(self, number: int | None) -> Tensor | float:
        if number is None:
            return 1.0
        total = self._totals.get(number)
        if total is None:
            raise ElasticRunError(
                "a loss was weighed by a count in the first micro-batches of a global "
                "batch, but not in the last, at which the sum of the counts is taken. "
                "Weigh it in each micro-batch; a loss to leave out has the count 0."
            )
        return total.share_of(self._num_samples) / self._world_size


class _Total:
    """The sum of a number over all replicas, on its way or there."""

    def __init__(
        self, own: Tensor, world_size: int, group: Any, in_step: InStep, place: str
    ) -> None:
        self._sum = own
        self._world_size = world_size
        self._in_step = in_step
        self._place = place  # Where the program weighs.
        self._work: Any = None
        if group is None:
            return
        in_step.num_counts += 1
        self._sum = own.clone()
        if own.is_cuda:  # The program waits for no sum there, so first for the others.
            work = dist.all_reduce(torch.zeros(()), group=group, async_op=True)
            in_step.await_count(work, place)
            dist.all_reduce(self._sum)
        else:
            self._work = dist.all_reduce(self._sum, group=group, async_op=True)

    def share_of(self, own: Tensor | float) -> Tensor:
        """Return `own` over the mean of all replicas' numbers, 0 if that is 0."""
        if self._work is not None:
            self._in_step.await_count(self._work, self._place)
            self._work = None
        total = self._sum.sum()
        return torch.where(total == 0, 0.0, own * self._world_size / total)


class _Weigh(torch.autograd.Function):
    """Leaves a loss as it is, and weighs its gradient."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, weighing: Weighing, factor: Factor, number: int | None
    ) -> Tensor:
        ctx.weighing, ctx.factor, ctx.number = weighing, factor, number
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.weighing.meet(ctx.number)
        weighed = gradient.double() * ctx.factor()
        return weighed.to(gradient.dtype), None, None, None


def weighed_by(weight: float, gradient: Tensor) -> Tensor | None:
    """Return a gradient times a weight, or None if that leaves it as it is."""
    if weight == 1.0:
        return None
    if weight == 0.0:  # A padding sample's, which may be infinite.
        return torch.zeros_like(gradient)
    return gradient * weight


def call_after_backward(callback: Callable[[], None]) -> None:
    """Let autograd call back at the end of the backward pass under way.

    A reentrant checkpoint's gradients come from passes of their own, within the pass.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _check_member(member: LoaderInLoop, loader: LoaderInLoop | None) -> None:
    """Refuse a loader that delivers nothing in this step, so has no weight in it."""
    if loader is None or not member.running_loop.current.part.num_read:
        where = "no loop is running" if loader is None else f"`{loader.name}` runs"
        raise ElasticRunError(
            f"weigh(member=`{member.name}`), but {where}, and that loader has no batch "
            "in this step. Give the member of the running CombinedLoader whose samples "
            "the loss is a mean over."
        )


def _is_whole(part: MicroBatchInfo) -> bool:
    """Return whether a micro-batch is this replica's whole part of a global batch."""
    return part.micro == 0 and part.is_step


def _is_all(loader: LoaderInLoop) -> bool:
    """Return whether all losses of one replica are over the whole global batch."""
    part = loader.running_loop.current.part
    return loader.has_one_weight and _is_whole(part) and part.weight == 1.0


def _check(count: Tensor | float | None, reduction: str) -> None:
    """Refuse a reduction that is unknown, or a count that contradicts it."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is neither 'mean' nor 'sum'.")
    if reduction == "sum" and count is not None:
        raise TypeError(
            "weigh() got a count for a loss with reduction='sum', which is a sum and "
            "needs none. For the mean over the global batch, divide the sum by this "
            "micro-batch's count and leave reduction= out: weigh(total / count, count)."
        )
