"""The batches that a transformers Trainer gets, from the position on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers.trainer
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler

from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.data.samplers import LengthGroups
from elasticrun.data.streams.iterables import streams_of
from elasticrun.data.streams.streams import InLanes
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
