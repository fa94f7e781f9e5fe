"""What Lightning iterates over; makes torch's loaders elastic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.errors import ElasticRunError
from elasticrun.integrations.checks import is_shuffled


class LoaderProxy:
    """Wraps a loader for Lightning, which iterates it.

    Args:
        read: Reads the batches; it is called when the first one is asked for, as
            Lightning wants an iterator before it has restored its counters.
    """

    def __init__(
        self,
        loader: AdaptiveDataLoader[Any],
        read: Callable[[LoaderProxy], Iterator[Any]],
    ) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self._read = read
        self.num_passes = 0  # In this epoch.

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._read(self)


def make_elastic(
    loader: DataLoader[Any], batch_size: int, *, name: str, is_for_training: bool
) -> AdaptiveDataLoader[Any]:
    """Return an AdaptiveDataLoader that delivers what a loader of torch's does."""
    has_workers = loader.num_workers > 0
    return AdaptiveDataLoader(
        loader.dataset,
        batch_size,
        _shuffles(loader),
        drop_last=loader.drop_last,
        even_batches=is_for_training,
        name=name,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor if has_workers else None,
        persistent_workers=loader.persistent_workers,
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return False
    shuffles = is_shuffled(sampler) if loader.batch_size is not None else None
    if shuffles is not None:
        return shuffles
    own = sampler if loader.batch_size is not None else loader.batch_sampler
    raise TypeError(
        f"fit() got a DataLoader with a {type(own).__name__}, which goes through its "
        "order once and cannot go on in the middle of it. Make it an "
        "AdaptiveDataLoader, whose sampler= and batch_sampler= are maps from a "
        "position to what is there; WeightedDraws, RandomWindows and LengthGroups are "
        "some."
    )


def check_equal_shares(loaders: list[AdaptiveDataLoader[Any]], world_size: int) -> None:
    """Refuse loaders of one step whose batches replicas cannot share evenly."""
    for loader in loaders if len(loaders) > 1 else []:
        batches = loader.batches_of_epoch()
        for number in {0, len(batches) - 1} if len(batches) else ():
            if batches.size(number) % world_size:
                raise ElasticRunError(
                    f"`{loader.name}` is one of {len(loaders)} loaders that deliver "
                    f"together, and global batch {number} of it has "
                    f"{batches.size(number)} samples, which {world_size} devices "
                    "cannot share evenly: a loss over several loaders has one weight. "
                    "Make each batch_size a multiple of the number of devices, with "
                    "drop_last=True if the last one is short."
                )
