"""A sampler for training loops that elasticrun does not own."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from operator import index as exact_int

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.order.permutation import Permutation
from elasticrun.replicas import gathering

# Samples of this rank whose indices are computed at once.
_CHUNK = 1 << 13


class ElasticSampler(Sampler[int]):
    """A distributed sampler that continues at any sample with any number of replicas.

        sampler = ElasticSampler(train_set)
        sampler.set_epoch(epoch, index=num_samples_done)    # of all replicas together
        loader = DataLoader(train_set, total_batch // world_size, sampler=sampler)

    From `index` on, rank r of R takes the positions index + r, index + r + R, and so on
    in the epoch's order, which depends on the seed and the epoch alone. While
    `total_batch` stays the same and divides by R, so do the samples of each step.

    All ranks get equally many: at the end, samples from the start of the order are
    repeated, fewer than R of them, or with `drop_last` the remainder is left out.

    Memory, and the time to continue, do not grow with the data set.

    Args:
        dataset: Anything with a length; its samples are not read here.
        shuffle: Whether each epoch has another order; else it is 0, 1, 2, ...
        seed: The same on every rank.
        num_replicas: R; the default process group's world size, or 1 without one.
        rank: r; this process's rank in the default process group, or 0 without one.
        drop_last: Leave out samples rather than repeat some.

    Raises:
        TypeError: A number is not an integer, or the data set has no length.
        ValueError: `num_replicas` is not positive, or `rank` is not below it.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = gathering.num_replicas()
        if rank is None:
            rank = gathering.own_rank()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = exact_int(seed)
        self.num_replicas, self.rank = exact_int(num_replicas), exact_int(rank)
        self.drop_last = drop_last
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank={rank} with num_replicas={num_replicas}: ranks go from 0 up, "
                "below that. Give both, or neither after init_process_group."
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int, index: int = 0) -> None:
        """Choose the epoch, and where in it the next iteration begins.

        Call it before each epoch, on every rank alike.

        Args:
            epoch: From 0; it decides the order if the sampler shuffles.
            index: Samples of this epoch that all replicas together have consumed.

        Raises:
            TypeError: An argument is not an integer.
            ValueError: `epoch` is negative, or `index` is not within the data set.
        """
        num_samples = len(self.dataset)
        self.epoch, self.index = exact_int(epoch), exact_int(index)
        if self.epoch < 0 or not 0 <= self.index <= num_samples:
            raise ValueError(
                f"epoch={epoch}, index={index}: epochs are counted from 0, and the "
                f"finished samples of one from 0 to {num_samples}. Set the index to 0 "
                "for a new epoch, and do not count padding."
            )
        self._num_samples = num_samples
        self._order: Permutation | None = None
        if self.shuffle:
            self._order = Permutation(num_samples, derive_seed(self.seed, epoch))

    def __len__(self) -> int:
        """Return how many samples an iteration yields on this rank."""
        num_left = self._num_samples - self.index
        if self.drop_last:
            return num_left // self.num_replicas
        return (num_left + self.num_replicas - 1) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Its own range, so that a later set_epoch cannot shift a running iteration.
        start = self.index + self.rank
        stop = start + len(self) * self.num_replicas
        return _indices(
            range(start, stop, self.num_replicas), self._num_samples, self._order
        )


def _indices(
    positions: range, num_samples: int, order: Permutation | None
) -> Iterator[int]:
    """Yield the data-set index at each position; the order goes round at its end."""
    for begin in range(0, len(positions), _CHUNK):
        chunk = positions[begin : begin + _CHUNK]
        indices: NDArray[np.int64] = (
            np.arange(chunk.start, chunk.stop, chunk.step, dtype=np.int64) % num_samples
        )
        yield from (indices if order is None else order.take(indices)).tolist()
