"""The batches of a transformers Trainer: from the position on, or of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler

from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.data.order.shares import partition
from elasticrun.data.samplers import LengthGroups
from elasticrun.data.streams.in_lanes import InLanes
from elasticrun.data.streams.iterables import streams_of
from elasticrun.errors import ElasticRunError
from elasticrun.integrations.checks import is_shuffled
from elasticrun.job.loop import MicroBatch


@dataclass(eq=False)
class LocalBatch:
    """This replica's part of a global batch, in micro-batches, each with its share."""

    pairs: list[tuple[Any, MicroBatch]]

    def without_padding(self) -> list[Any]:
        """Return the micro-batches, one of padding without its rows."""
        return [
            inputs if share.part.num_valid else without_rows(inputs)
            for inputs, share in self.pairs
        ]


def without_rows(inputs: Any) -> dict[str, Any]:
    """Return inputs of no sample, in which everything counts 0."""
    return {
        name: value[:0] if isinstance(value, Tensor | list) else value
        for name, value in inputs.items()
    }


@dataclass(eq=False)
class LocalBatches:
    """Wraps the loader for the Trainer, which iterates an epoch."""

    loader: AdaptiveDataLoader[Any]
    epoch: int
    first: int

    def __iter__(self) -> Iterator[LocalBatch]:
        pairs = []
        for inputs, share in self.loader.read(self.epoch, self.first):
            pairs.append((inputs, share))
            if share.part.is_step:
                yield LocalBatch(pairs)
                pairs = []


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Skip batches as the Trainer does; ours begin where the job is."""
    if isinstance(dataloader, LocalBatches):
        return dataloader
    return _skip_of_accelerate(dataloader, num_batches)


if hasattr(transformers.trainer, "skip_first_batches"):  # Else no Trainer is made.
    _skip_of_accelerate = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = _skip_first_batches


def order(sampler: Any, batch_size: int) -> dict[str, Any]:
    """Return the loader's arguments for the order that the Trainer would have."""
    if sampler is None:  # Of iterable data, which it takes as it comes.
        return {}
    shuffles = is_shuffled(sampler)
    if shuffles is not None:
        return {"shuffle": shuffles}
    if type(sampler) is LengthGroupedSampler:
        return {"sampler": LengthGroups(sampler.lengths, batch_size)}
    raise ElasticRunError(
        f"the Trainer's sampler is a {type(sampler).__name__}, an order that cannot be "
        "read from a place on at any number of devices. train_sampling_strategy is "
        '"random", "sequential" or "group_by_length" here; for another order let '
        "get_train_dataloader return an AdaptiveDataLoader with it."
    )


def with_length(dataset: Any, description: str) -> Any:
    """Return data that has samples by number; of iterable data, its streams."""
    if isinstance(dataset, IterableDataset):
        dataset = streams_of(dataset)
    is_endless = isinstance(dataset, InLanes) and not dataset.has_end
    if is_endless or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{description}: a {type(dataset).__name__} has no length, so that nobody "
            "knows where an epoch ends. Give a data set with __len__ and __getitem__, "
            "streams that can be counted, or a Mixed with num_samples."
        )
    return dataset


@dataclass(eq=False)
class SharedBatches:
    """The batches of an evaluation, in order, each shared out; a batch sampler.

    A replica without a sample in a batch gets its first one, which is not counted.
    """

    num_samples: int
    batch_size: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield list(self.shares(number)[self.rank]) or [number * self.batch_size]

    def shares(self, number: int) -> list[range]:
        """Return the samples of each replica in a batch."""
        start = number * self.batch_size
        batch = range(start, min(start + self.batch_size, self.num_samples))
        return [
            partition(batch, rank, num_parts=self.world_size)
            for rank in range(self.world_size)
        ]


class Evaluation:
    """An evaluation that is running, and how its batches are shared out.

    Attributes:
        share: Of this replica's loss in the mean of the batch.
        is_loss_next: Whether that loss is what is gathered next.
    """

    def __init__(self, batches: SharedBatches, accelerator: Any) -> None:
        self._batches = batches
        self._accelerator = accelerator
        self._number = -1
        self._lengths: list[int] = []
        self.num_replicas = batches.world_size
        self.share = 0.0
        self.is_loss_next = False

    def begin_batch(self) -> None:
        """Go on to the next batch."""
        self._number += 1
        self._lengths = [len(share) for share in self._batches.shares(self._number)]
        self.share = self.num_own / sum(self._lengths)

    def count_items(self, num_items: Tensor) -> None:
        """Take the loss for a mean over so many items (tokens) of this replica's.

        Collective.
        """
        own = num_items * min(1, self.num_own)
        self.share = (own / self._accelerator.gather(own).sum().clamp(min=1)).item()

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
        return recursively_apply(self._gather_own, values, error_on_other_type=True)

    def _loss_of_each(self, loss: Tensor) -> Tensor:
        """Return a loss for each sample, with the batch's as the mean of all."""
        num_own = max(1, self.num_own)
        return (loss * (self.share * sum(self._lengths) / num_own)).repeat(num_own)

    def _gather_own(self, rows: Tensor) -> Any:
        return self._accelerator.gather(rows[: self.num_own])


def gather_rows(gather: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return the rows of all replicas, which may have different numbers of them.

    Collective.
    """
    return recursively_apply(partial(_gather_rows, gather), values)


def _gather_rows(gather: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    if rows.ndim == 0:
        return gather(rows)
    lengths = gather(torch.tensor(len(rows), device=rows.device)).tolist()
    longest = max(lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = gather(padded)
    return torch.cat(
        [gathered[number * longest :][:length] for number, length in enumerate(lengths)]
    )
