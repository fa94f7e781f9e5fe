"""`InLanes`: a data set that replicas and workers read lane by lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from elasticrun.data.order.lanes import DealtLanes, LaneOrder, LanesOrder
from elasticrun.data.streams.index import Contents
from elasticrun.errors import counted
from elasticrun.logger import Logger

logger = Logger(__name__)

_UNEVEN = 1.2  # The largest share of a replica, over the mean one, that is not told.


class InLanes(Dataset[Any], ABC):
    """A data set that has lanes; samples have numbers over all of them."""

    @property
    @abstractmethod
    def lanes(self) -> DealtLanes:
        """How its samples are dealt to lanes."""

    @property
    def has_end(self) -> bool:
        """Whether one loop over it ends."""
        return True

    @property
    def draws(self) -> bool:
        """Whether reading a sample may draw at random, so that it is seeded."""
        return True

    @property
    def beginning(self) -> str:
        """The first samples as text, where nothing else tells that data is the same."""
        return ""

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """What a checkpoint knows of each stream, to tell what has changed."""

    @abstractmethod
    def place(self, index: int) -> tuple[str, int]:
        """Return the stream of a sample, and its number there."""

    def describe(self, index: int) -> str:
        """Return what messages call a sample."""
        stream, number = self.place(index)
        return f"sample {number} of {stream}"

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def prepare(self, rank: int, world_size: int) -> None:
        """Do ahead of time what reading a replica's lanes will need."""

    @abstractmethod
    def apart(self, *, is_shuffled: bool) -> InLanes:
        """Return the same data for one loop to read: no other one moves its files."""

    def __len__(self) -> int:
        """Return the samples of all streams."""
        return len(self.lanes)


def lanes_of(
    dataset: InLanes,
    sampler: Any,
    batch_sampler: Any,
    *,
    shuffle: bool,
    rank: int,
    world_size: int,
    num_shares: int,
) -> DealtLanes:
    """Return the lanes of a data set in streams, ready to read.

    Args:
        num_shares: In how many shares a global batch is cut.
    """
    if sampler is not None or batch_sampler is not None:
        raise ValueError(
            f"{type(dataset).__name__} is read in streams, in their own order: a "
            "sampler would make it open a stream for each sample. Use shuffle=True; to "
            "mix several data sets, use Mixed."
        )
    lanes = dataset.lanes
    if rank == 0:
        _warn_of_uneven(
            type(dataset).__name__, lanes.order(0 if shuffle else None), num_shares
        )
    dataset.prepare(rank, world_size)
    return lanes


def _warn_of_uneven(name: str, lanes: LanesOrder, world_size: int) -> None:
    """Warn where lanes do not divide well among the replicas."""
    if lanes.num_lanes < world_size:
        logger.warning(
            "%s has %s for %d replicas, so each replica reads all streams and keeps "
            "its part. Split the data into more streams, or give more lanes.",
            name,
            counted(lanes.num_lanes, "lane"),
            world_size,
        )
    elif isinstance(lanes, LaneOrder):
        owners = np.arange(lanes.num_lanes) % world_size
        own = np.bincount(owners, weights=lanes.totals)
        if own.max() > _UNEVEN * own.mean():
            logger.warning(
                "%s: one of %d replicas reads %.1f times its share, because there are "
                "few lanes, or streams of different length that are read whole. Split "
                "the data into more streams of similar length.",
                name,
                world_size,
                own.max() / own.mean(),
            )
