"""Adds what the shares of a global batch give, in an order that nothing else decides.

The tree over the shares is the same whoever owns them: a node is the sum of its two
halves, or the one half that there is. Of six shares, with two of them left out:

    ((0 + 1) + (2 + 3)) + (4 + 5)        ((0 + 1) + 2) + 5
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticrun.data.order.shares import partition
from elasticrun.errors import ElasticRunError


class TreeSum:
    """The sum of what comes share by share; holds a node for each level at most.

    One that adds a run of the shares ends with the nodes that lie in it as a whole.
    Added in their order to another one, those of all runs give the sum of all.

    Args:
        first: The first share of the run.
        spare: What memory is put in that is not needed any more.

    Attributes:
        nodes: The first share that each one has, and its sum, from left to right.
    """

    def __init__(self, first: int = 0, spare: list[Tensor] | None = None) -> None:
        self._first = first
        self._spare = [] if spare is None else spare
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
            if not is_last:
                self._spare.append(b)

    def nodes_before(self, end: float) -> list[tuple[int, Tensor]]:
        """Return the nodes when no share before `end` comes any more."""
        if len(self.nodes) == 1:  # As where a process has one share.
            return self.nodes
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
        """Return the sum of all shares, in memory of its own."""
        *others, (_, total) = self.nodes
        if not others:
            return total.clone()
        total = others.pop()[1] + total
        for _, left in reversed(others):
            total.add_(left)
        return total


def add_to(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where that is dense."""
    return second + first if first.is_sparse else first.add_(second)


# Returns what this process has of a gradient, by its parameter's number, if anything.
SumOf = Callable[[int], TreeSum | None]


class TreeReduction:
    """Adds up the gradients of all processes' shares, exactly as one process would.

    They go in buckets, as in DDP: the last parameters' first, whose gradients come
    first. A bucket is sent during the backward pass once it is complete, and those
    before it are sent; the last one when the pass has ended.

    Args:
        parameters: Those of one module, in the same order in each process.
        num_shares: Of a global batch.
        bucket_mib: What a bucket holds; the first one holds 1 MiB at most.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        num_shares: int,
        rank: int,
        size: int,
        bucket_mib: float = 25,
    ) -> None:
        self._parameters = parameters
        self._num_shares = num_shares
        self._bucket_bytes = [int(min(1, bucket_mib) * 2**20), int(bucket_mib * 2**20)]
        self._rank = rank
        shares = range(num_shares)
        self._runs = [partition(shares, r, num_parts=size) for r in range(size)]
        self._nodes = [_first_shares(run) for run in self._runs]
        # Which parameters were trained in a backward pass of the global batch: one that
        # is frozen in a later pass keeps its gradient.
        self._trained: set[int] = set()
        self._kinds: list[Any] = []  # Of the parameters that the buckets are for.
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, int] = {}
        # In the backward pass under way: how many gradients each bucket waits for, how
        # many buckets were sent, and whether a gradient came behind its bucket.
        self._num_awaited: list[int] = []
        self._num_sent = 0
        self._is_late = False

    def new_sum(self, spare: list[Tensor] | None = None) -> TreeSum:
        """Return the sum of no gradient yet, of one parameter in this process."""
        return TreeSum(self._runs[self._rank].start, spare)

    def begin_pass(self) -> None:
        """Prepare a backward pass behind which gradients are asked for."""
        if len(self._runs) == 1:
            return
        self.check_complete()
        trained = [each.requires_grad for each in self._parameters]
        self._trained.update(n for n, is_trained in enumerate(trained) if is_trained)
        self._fill_buckets()
        self._num_awaited = [sum(trained[n] for n in b.numbers) for b in self._buckets]
        self._is_late = False

    def has_several_buckets(self) -> bool:
        """Return whether any is sent before the backward pass has ended."""
        self._fill_buckets()
        return len(self._buckets) > 1

    def begin_batch(self) -> None:
        """Prepare for the gradients of another global batch."""
        self.check_complete()
        self._trained.clear()

    def check_complete(self) -> None:
        """Refuse to go on behind a pass that was left when some buckets were sent.

        Others may have come less far, and would take the next ones for those.
        """
        if self._num_sent:
            raise ElasticRunError(
                "the program went on after a backward pass had ended in an exception, "
                "in a job with virtual_replicas. Gradients of that pass are with the "
                "other processes by now, and cannot be taken back. Let the exception "
                "end the process: the job goes on from the batch before."
            )

    def send_ready(self, number: int, sum_of: SumOf) -> None:
        """Send the buckets that are complete once a parameter has its gradient."""
        if len(self._buckets) < 2:
            return
        bucket = self._bucket_of[number]
        self._num_awaited[bucket] -= 1
        # Reentrant checkpoints that share a parameter bring it two gradients in a pass.
        self._is_late |= bucket < self._num_sent
        while self._num_sent < len(self._buckets) - 1:
            if self._num_awaited[self._num_sent] > 0:
                break
            self._send_next(sum_of)

    def means(self, sum_of: SumOf) -> dict[int, Tensor]:
        """Return the mean gradient of each parameter for which a share has any.

        Collective, with several processes.
        """
        is_alone = len(self._runs) == 1
        if is_alone:
            sums = {n: sum_of(n) for n in range(len(self._parameters))}
            totals = {number: own.total() for number, own in sums.items() if own}
        else:
            totals, was_late = self._received(sum_of)
            self._num_sent, self._is_late = 0, False
            if was_late:  # Some process has added to what it had sent.
                totals, _ = self._received(sum_of)
                self._num_sent = 0
        if not totals:
            return {}
        means = [*totals.values()]
        if is_alone:
            means = [total.div_(self._num_shares) for total in means]
        else:  # Those are in the buckets.
            means = [*torch._foreach_div(means, self._num_shares)]
        found = dict(zip(totals, means, strict=True))
        # In memory of their own that is laid out as the parameter, as autograd has it:
        # a norm adds in the order in which numbers lie there.
        for number, mean in found.items():
            parameter = self._parameters[number]
            if mean.stride() != parameter.stride():
                found[number] = torch.empty_like(parameter, requires_grad=False)
                found[number].copy_(mean)
        return found

    def _fill_buckets(self) -> None:
        """Make buckets for the parameters, if they are not those of before."""
        kinds = [
            (each.dtype, each.device)
            if each.requires_grad or number in self._trained
            else None
            for number, each in enumerate(self._parameters)
        ]
        if kinds == self._kinds:
            return
        self._kinds = kinds
        trained = [number for number, kind in enumerate(kinds) if kind][::-1]
        parameters = [self._parameters[number] for number in trained]
        places: list[list[int]] = []
        if parameters:  # Else torch aborts.
            places, _ = dist._compute_bucket_assignment_by_size(
                parameters, self._bucket_bytes
            )
        self._buckets = [
            _Bucket(
                [trained[place] for place in of_one],
                [parameters[place] for place in of_one],
                self._nodes,
                self._rank,
            )
            for of_one in places
        ]
        self._bucket_of = {
            number: place
            for place, bucket in enumerate(self._buckets)
            for number in bucket.numbers
        }

    def _send_next(self, sum_of: SumOf) -> None:
        end = self._runs[self._rank].stop
        bucket = self._buckets[self._num_sent]
        sums = [sum_of(number) for number in bucket.numbers]
        nodes = [own.nodes_before(end) if own else [] for own in sums]
        bucket.send(nodes, is_late=self._is_late)
        self._num_sent += 1

    def _received(self, sum_of: SumOf) -> tuple[dict[int, Tensor], bool]:
        """Return the totals, and whether any process has marked a gradient as late."""
        while self._num_sent < len(self._buckets):
            self._send_next(sum_of)
        for bucket in self._buckets:
            bucket.gather()
        totals: dict[int, Tensor] = {}
        was_late = False
        for bucket in self._buckets:
            found, was_late = bucket.totals()
            totals |= found
        return totals, was_late


class _Bucket:
    """Adds up what all processes have for some parameters of one kind.

    1. Each process lays the nodes that its run has into rows, one below the other. What
       is missing is -0.0 there, which leaves every number as it is, also -0.0.
    2. It sends each process a slice of its rows (all-to-all).
    3. Each adds the rest of the tree for its slice, and all gather the slices.

    With one share a process that is the traffic of a ring all-reduce. Two processes
    with a node each do one: the sum of two numbers is the same in either order.

    Args:
        numbers: Of the parameters.
        parameters: All of one type and device.
        nodes: The first share of each node that a process has, by the processes.
        rank: Of this one.
    """

    def __init__(
        self,
        numbers: list[int],
        parameters: list[Tensor],
        nodes: list[list[int]],
        rank: int,
    ) -> None:
        self.numbers = numbers
        self._nodes = nodes
        self._rank = rank
        self._is_pair = len(nodes) == 2 and max(map(len, nodes)) == 1
        # Behind the gradients there is a mark for each, not 0 where a share has one,
        # and one for a gradient that came behind its bucket.
        lengths = [*(each.numel() for each in parameters), len(parameters) + 1]
        self._slice = -(-sum(lengths) // len(nodes))
        # Kept from batch to batch, as DDP keeps its buckets.
        like, num_rows = parameters[0].detach(), max(map(len, nodes))
        self._sent = like.new_zeros((num_rows, len(nodes) * self._slice))
        split: Any = torch.split  # Which torch has left untyped.
        self._rows: list[list[Tensor]] = []  # Where each gradient is, and the marks.
        for row in self._sent:
            *parts, marks = split(row[: sum(lengths)], lengths)
            shaped = zip(parts, parameters, strict=True)
            self._rows.append([*(part.view_as(each) for part, each in shaped), marks])
        self._whole = self._sent[0]  # In the end.
        self._values = self._sent  # As received.
        self._work: Any = None

    def send(self, nodes: list[list[tuple[int, Tensor]]], *, is_late: bool) -> None:
        """Send this process's nodes of each parameter; does not wait. Collective."""
        firsts, num_parts = self._nodes[self._rank], len(self.numbers)
        marks = [[0.0] * num_parts + [float(is_late)] for _ in firsts]
        places: list[Tensor] = []
        values: list[Tensor] = []
        for number, of_one in enumerate(nodes):
            for share, value in of_one:
                row = bisect_right(firsts, share) - 1
                marks[row][number] = 1.0
                places.append(self._rows[row][number])
                values.append(value)
        if len(values) < len(firsts) * num_parts:
            self._sent.fill_(-0.0)
        for (*_, place), marked in zip(self._rows, marks, strict=False):
            places.append(place)
            values.append(self._sent.new_tensor(marked))
        torch._foreach_copy_(places, values)
        if self._is_pair:
            self._work = dist.all_reduce(self._whole, async_op=True)
            return
        size = len(self._nodes)
        sent = self._sent.view(-1, size, self._slice).transpose(0, 1).contiguous()
        self._values = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._values, sent, async_op=True)

    def gather(self) -> None:
        """Add what has come, and gather what all have added. Collective."""
        self._work.wait()
        if self._is_pair:
            return
        tree = TreeSum()
        for nodes, values in zip(self._nodes, self._values, strict=True):
            for share, value in zip(nodes, values, strict=False):
                tree.add(share, value)
        slices = [*self._whole.chunk(len(self._nodes))]
        self._work = dist.all_gather(slices, tree.total(), async_op=True)

    def totals(self) -> tuple[dict[int, Tensor], bool]:
        """Return the totals of what any share has, and whether one came late."""
        self._work.wait()
        self._values, self._work = self._sent, None  # Which holds on to them, too.
        *parts, marks = self._rows[0]
        *has_any, is_late = marks.tolist()
        found = zip(self.numbers, parts, has_any, strict=True)
        totals = {number: part for number, part, has in found if has}
        return totals, bool(is_late)


def _first_shares(run: range) -> list[int]:
    """Return the first shares of the largest nodes that lie in a run as a whole."""
    tree = TreeSum(run.start)
    for share in run:
        tree.add(share, torch.zeros(()))
    return [share for share, _ in tree.nodes_before(run.stop)]
