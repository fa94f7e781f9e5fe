"""Samplers: orders for a loader's `sampler=`, and one for loops of somebody else's.

Torch's samplers draw one index after another. These give the index at any position, by
the loop's key: a loop is entered anywhere, and each replica draws for its share alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sized
from operator import index as exact_int

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from elasticrun.checkpoint.seeding import derive_seed, derive_seeds
from elasticrun.data.order.batches import Passes
from elasticrun.data.order.permutation import Order, Permutation
from elasticrun.replicas import gathering

_Indices = NDArray[np.int64]
_CHUNK = 1 << 13  # Indices of an `ElasticSampler` that are computed at once.


class Map:
    """An order that is read at many positions at once.

    Args:
        length: Of the order.
        take: Returns the data-set indices at positions, in an array of the same shape.
    """

    def __init__(self, length: int, take: Callable[[_Indices], _Indices]) -> None:
        self._length = length
        self.take = take

    def __len__(self) -> int:
        return self._length


class WeightedDraws:
    """Draws that take sample i with a probability in proportion to `weights[i]`.

    Each loop draws anew. With replacement, entering a loop costs nothing, wherever; a
    draw is a search in the sums of the weights. Without, a loop begins by sorting as
    many numbers as there are weights.

        train = AdaptiveDataLoader(data, 64, sampler=WeightedDraws(weights))

    Args:
        weights: One for each sample, from 0 up.
        num_samples: Draws in one loop; None for as many as there are weights, without
            replacement as there are weights above 0.
        replacement: Whether a sample may be drawn more than once in a loop.

    Raises:
        ValueError: The weights are none, or do not suffice.
    """

    def __init__(
        self,
        weights: ArrayLike,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
    ) -> None:
        self._weights = np.asarray(weights, np.float64)
        if self._weights.ndim != 1 or not self._weights.sum() > 0:
            raise ValueError(
                f"weights of the shape {self._weights.shape} with the sum "
                f"{self._weights.sum()}: give one number from 0 up for each sample, "
                "and one above 0 at least."
            )
        if not (np.isfinite(self._weights).all() and self._weights.min() >= 0):
            raise ValueError(
                "a weight is negative or not finite, which is no share of the draws. "
                "Give numbers from 0 up."
            )
        most = len(self._weights)
        if not replacement:
            most = int(np.count_nonzero(self._weights))
        self._num_samples = most if num_samples is None else num_samples
        self._replacement = replacement
        self._sums = np.cumsum(self._weights)  # Once: a loop begins without it.
        if not replacement and self._num_samples > most:
            raise ValueError(
                f"num_samples={num_samples} draws without replacement of {most} "
                "weights above 0: there are not so many samples. Draw fewer, or with "
                "replacement=True."
            )

    def __len__(self) -> int:
        return self._num_samples

    def keyed(self, key: int) -> Map:
        """Return the order of the loop that has a key."""
        if self._replacement:
            return self._with_replacement(key)
        # The order of exponential waiting times with these rates is such a draw
        # (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
        with np.errstate(divide="ignore"):
            waits = -np.log1p(-_uniform(key, np.arange(len(self._weights))))
            waits /= self._weights
        indices = np.argsort(waits, kind="stable")[: self._num_samples]
        return Map(self._num_samples, indices.take)

    def _with_replacement(self, key: int) -> Map:
        sums = self._sums
        last = np.searchsorted(sums, sums[-1])  # That a draw may give.

        def take(positions: _Indices) -> _Indices:
            drawn = _uniform(key, positions) * sums[-1]
            found = np.searchsorted(sums, drawn, side="right")
            indices: _Indices = np.minimum(found, last).astype(np.int64)
            return indices

        return Map(self._num_samples, take)


class RandomWindows:
    """Draws of where a window into a long array begins, all equally likely.

        train = AdaptiveDataLoader(
            windows, 64, sampler=RandomWindows(len(text), 256, num_samples=100_000)
        )

    where `windows[i]` is `text[i : i + 256]`.

    Args:
        length: Of the array.
        window: Of what one sample needs: its context, and a target behind it.
        num_samples: Draws in one loop.

    Raises:
        ValueError: The array is shorter than a window.
    """

    def __init__(self, length: int, window: int, *, num_samples: int) -> None:
        if not 1 <= window <= length:
            raise ValueError(
                f"window={window} does not lie within an array of {length}. Give a "
                "window from 1 up, and an array that is not shorter."
            )
        self._num_starts = length - window + 1
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def keyed(self, key: int) -> Map:
        """Return the order of the loop that has a key."""
        return Map(
            self._num_samples,
            lambda at: (_uniform(key, at) * self._num_starts).astype(np.int64),
        )


class LengthGroups:
    """A shuffled order in which the samples of a batch have similar lengths.

    Windows of `window` global batches of a shuffled order are sorted by length and cut
    into batches, which come in a shuffled order again: every sample once in a loop, and
    hardly any padding. Entering a loop anywhere costs the sorting of one window.

        train = AdaptiveDataLoader(data, 64, sampler=LengthGroups(lengths, 64))

    Args:
        lengths: Of each sample.
        batch_size: The loader's.
        window: Global batches that are sorted together: more of them, and lengths are
            more alike; fewer, and batches are more random.
    """

    def __init__(
        self, lengths: ArrayLike, batch_size: int, *, window: int = 50
    ) -> None:
        self._lengths = np.asarray(lengths)
        self._batch_size = batch_size
        self._window = window

    def __len__(self) -> int:
        return len(self._lengths)

    def keyed(self, key: int) -> Map:
        """Return the order of the loop that has a key."""
        order = Permutation(len(self), derive_seed(key, 0))

        @functools.lru_cache(maxsize=1)
        def of_window(number: int) -> Order:
            batches = derive_seed(key, 1, number)
            return self._indices_of_window(number, order, key=batches).take

        return Map(len(self), Passes(self._window * self._batch_size, of_window))

    def _indices_of_window(
        self, number: int, order: Permutation, *, key: int
    ) -> _Indices:
        """Return a window's indices: its full batches shuffled, and then the rest.

        Only the last window may have a rest, which ends the loop as a short batch.
        """
        size = self._batch_size
        start = number * self._window * size
        end = min(start + self._window * size, len(self))
        found = order.take(np.arange(start, end))
        # Those of one length stay shuffled.
        found = found[np.argsort(self._lengths[found], kind="stable")]
        num_full = len(found) // size
        numbers = Permutation(num_full, key).take(np.arange(num_full))
        batches = found[: num_full * size].reshape(num_full, size)[numbers]
        return np.concatenate([batches.reshape(-1), found[num_full * size :]])


def _uniform(key: int, numbers: _Indices) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each one, of a double's 53 bits."""
    words = derive_seeds(key, np.asarray(numbers, np.int64)) >> np.uint64(11)
    return words.astype(np.float64) * math.ldexp(1.0, -53)


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
        return _indices_at(
            range(start, stop, self.num_replicas), self._num_samples, self._order
        )


def _indices_at(
    positions: range, num_samples: int, order: Permutation | None
) -> Iterator[int]:
    """Yield the data-set index at each position; the order goes round at its end."""
    for begin in range(0, len(positions), _CHUNK):
        chunk = positions[begin : begin + _CHUNK]
        indices: _Indices = (
            np.arange(chunk.start, chunk.stop, chunk.step, dtype=np.int64) % num_samples
        )
        yield from (indices if order is None else order.take(indices)).tolist()
