"""Adds what the shares of a global batch give, in an order that nothing else decides.

The tree over the shares is the same whoever owns them: a node is the sum of its two
halves, or the one half that there is. Of six shares, with two of them left out:

    ((0 + 1) + (2 + 3)) + (4 + 5)        ((0 + 1) + 2) + 5
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticrun.data.order.shares import partition


class TreeSum:
    """The sum of what comes share by share; holds a node for each level at most.

    One that adds a run of the shares ends with the nodes that lie in it as a whole.
    Added in their order to another one, those of all runs give the sum of all.

    Args:
        first: The first share of the run.

    Attributes:
        nodes: The first share that each one has, and its sum, from left to right.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self.nodes: list[tuple[int, Tensor]] = []

    def add(self, share: int, value: Tensor) -> None:
        """Add what is this object's from now on; shares come in their order.

        A share may come in several pieces.
        """
        if self.nodes and self.nodes[-1][0] == share:
            self.nodes[-1] = share, add_to(self.nodes[-1][1], value)
            return
        self._join(share)
        self.nodes.append((share, value))

    def _join(self, end: float, *, is_last: bool = False) -> None:
        """Add up the halves of each node to which no share before `end` comes any more.

        Args:
            is_last: Whether to leave what is added up as it is.
        """
        while len(self.nodes) > 1:
            (left, a), (right, b) = self.nodes[-2:]
            size = 1 << (left ^ right).bit_length()  # Of the least node with both.
            start = left // size * size
            if start < self._first or start + size > end:
                break
            self.nodes[-2:] = [(left, a + b if is_last else add_to(a, b))]

    def nodes_before(self, end: float) -> list[tuple[int, Tensor]]:
        """Return the nodes when no share before `end` comes any more."""
        joined = self._copy()
        joined._join(end, is_last=True)
        return joined.nodes

    def plus(self, share: int, value: Tensor) -> TreeSum:
        """Return the sum with what a share may yet add more to."""
        longer = self._copy()
        if longer.nodes and longer.nodes[-1][0] == share:
            longer.nodes[-1] = share, longer.nodes[-1][1] + value
        else:
            longer._join(share, is_last=True)
            longer.nodes.append((share, value))
        return longer

    def _copy(self) -> TreeSum:
        copy = TreeSum(self._first)
        copy.nodes = [*self.nodes]
        return copy

    def total(self) -> Tensor:
        """Return the sum of all shares."""
        ((_, total),) = self.nodes_before(float("inf"))
        return total


def add_to(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where that is dense."""
    return second + first if first.is_sparse else first.add_(second)


class TreeReduction:
    """Adds up the gradients of all processes' shares, exactly as one process would.

    Each process sends every other one a slice of the nodes that its run has, which adds
    the rest of the tree for that slice; then the slices of the total are gathered. With
    one share a process that is the traffic of a ring all-reduce. What is missing is
    -0.0 there, which leaves every number as it is, also -0.0.

    Args:
        parameters: Those of one module, in the same order in each process.
        num_shares: Of a global batch.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, num_shares: int, rank: int, size: int
    ) -> None:
        self._parameters = parameters
        self._num_shares = num_shares
        self._rank = rank
        shares = range(num_shares)
        self._runs = [partition(shares, r, num_parts=size) for r in range(size)]
        self._nodes = [_first_shares(run) for run in self._runs]

    def new_sum(self) -> TreeSum:
        """Return the sum of no gradient yet, of one parameter in this process."""
        return TreeSum(self._runs[self._rank].start)

    def means(self, sums: Mapping[Tensor, TreeSum]) -> dict[Tensor, Tensor]:
        """Return the mean gradient of each parameter for which a share has any.

        Collective, with several processes.
        """
        trained = [each for each in self._parameters if each.requires_grad]
        totals: dict[Tensor, Tensor] = {}
        if len(self._runs) == 1:
            totals = {each: sums[each].total() for each in trained if each in sums}
        else:
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for each in trained:
                kinds.setdefault((each.dtype, each.device), []).append(each)
            for parameters in kinds.values():
                totals |= self._exchanged(parameters, sums)
        # In memory of their own that is laid out as the parameter, as autograd has it:
        # a norm adds in the order in which numbers lie there.
        return {
            each: torch.div(
                total, self._num_shares, out=torch.empty_like(each, requires_grad=False)
            )
            for each, total in totals.items()
        }

    def _exchanged(
        self, parameters: list[Tensor], sums: Mapping[Tensor, TreeSum]
    ) -> dict[Tensor, Tensor]:
        """Return the total gradients of parameters of one kind."""
        size, first = len(self._runs), parameters[0].detach()
        # Behind the gradients there is a number for each, 0 where no share has one.
        lengths = [each.numel() for each in parameters] + [1] * len(parameters)
        slice_ = -(-sum(lengths) // size)
        most = max(map(len, self._nodes))
        sent = first.new_full((most, size * slice_), -0.0)
        split: Any = torch.split  # Which torch has left untyped.
        rows = [split(row[: sum(lengths)], lengths) for row in sent]
        end = self._runs[self._rank].stop
        for place, parameter in enumerate(parameters):
            own = sums[parameter].nodes_before(end) if parameter in sums else []
            for share, value in own:
                row = rows[bisect_right(self._nodes[self._rank], share) - 1]
                row[place].view_as(value).copy_(value)
                row[len(parameters) + place].fill_(1.0)
        sent = sent.view(most, size, slice_).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tree = TreeSum()
        for nodes, values in zip(self._nodes, received, strict=True):
            for share, value in zip(nodes, values, strict=False):
                tree.add(share, value)
        whole = first.new_empty(size * slice_)
        dist.all_gather(list(split(whole, slice_)), tree.total().contiguous())
        totals = split(whole[: sum(lengths)], lengths)
        marks = torch.cat(totals[len(parameters) :]).tolist()
        return {
            parameter: total.view_as(parameter)
            for parameter, total, mark in zip(parameters, totals, marks, strict=False)
            if mark
        }


def _first_shares(run: range) -> list[int]:
    """Return the first shares of the largest nodes that lie in a run as a whole."""
    tree = TreeSum(run.start)
    for share in run:
        tree.add(share, torch.zeros(()))
    return [share for share, _ in tree.nodes_before(run.stop)]
