"""Evaluations of a Trainer of transformers, in which each sample counts once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from elasticrun.data.order.partition import partition


class SharedBatches:
    """The batches of an evaluation, in order, each shared out; a batch sampler.

    A replica without a sample in a batch gets its first one, which is not counted.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int
    ) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._world_size = world_size
        self.rank = rank

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield list(self.shares(number)[self.rank]) or [number * self._batch_size]

    def shares(self, number: int) -> list[range]:
        """Return the samples of each replica in a batch."""
        start = number * self._batch_size
        size = min(self._batch_size, self._num_samples - start)
        return [
            partition(start, size, rank=rank, world_size=self._world_size)
            for rank in range(self._world_size)
        ]


class Evaluation:
    """An evaluation that is running, and how its batches are shared out.

    Attributes:
        counts_items: Whether the loss of this batch is divided by its items.
        is_loss_next: Whether that loss is what is gathered next.
    """

    def __init__(self, batches: SharedBatches, accelerator: Any) -> None:
        self._batches = batches
        self._accelerator = accelerator
        self._number = -1
        self._lengths: list[int] = []
        self.counts_items = False
        self.is_loss_next = False

    def begin_batch(self) -> None:
        """Go on to the next batch."""
        self._number += 1
        self._lengths = [len(share) for share in self._batches.shares(self._number)]
        self.counts_items = False

    @property
    def num_own(self) -> int:
        """How many samples of the batch are this replica's."""
        return self._lengths[self._batches.rank]

    def gather(self, values: Any, **_: Any) -> Any:
        """Return the values of all replicas, in the order of the samples.

        Collective.
        """
        if self.is_loss_next:
            self.is_loss_next = False
            values = self._loss_of_each(values[0])
        return recursively_apply(self._gather, values, error_on_other_type=True)

    def _loss_of_each(self, loss: Tensor) -> Tensor:
        """Return a loss for each sample, with the batch's as the mean of all."""
        if self.counts_items and self.num_own:
            share = self.num_own * len(self._lengths) / sum(self._lengths)
            loss = loss / share
        return loss.repeat(max(1, self.num_own))

    def _gather(self, rows: Tensor) -> Tensor:
        lengths = self._lengths
        if len(lengths) == 1:
            return rows
        longest = max(lengths)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: self.num_own] = rows[: self.num_own]
        gathered = self._accelerator.gather(padded).split(longest)
        return torch.cat(
            [part[:length] for part, length in zip(gathered, lengths, strict=True)]
        )
