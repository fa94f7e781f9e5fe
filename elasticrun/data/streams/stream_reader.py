"""Reading one stream nearly in sequence, and the blocks of many."""

from __future__ import annotations

import functools
import gzip
import io
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from elasticrun.data.order.permutation import MAX_INDEX
from elasticrun.errors import ElasticRunError
from elasticrun.logger import Logger

logger = Logger(__name__)

_AHEAD = 1, 64  # Samples that are read at once, first and then.
_SLOW_SECONDS = 5.0  # To enter a stream: worth a warning.
# Between attempts to read from a storage that fails, about a minute in all.
_WAIT_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_LASTING = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    gzip.BadGzipFile,
    io.UnsupportedOperation,
)
_OTHER_LENGTH = (
    "If its samples differ from epoch to epoch (set_epoch, packing), let nobody count "
    "them: AdaptiveDataLoader(Uncounted(dataset), ...), with Uncounted from "
    "elasticrun. If the data has changed, start anew with another checkpoint directory."
)


LENGTHS = "lengths="  # Given for each stream by the program.


@functools.cache  # Once in a process, not in each epoch.
def _warn_of_more(goes_on: str, given_by: str) -> None:
    logger.warning(
        "%s, which is what %s says. The others are never read. If all are to be, let "
        "it return the samples (not batches) of all replicas, or leave it out.",
        goes_on,
        given_by,
    )


def more_than_lengths(name: str, length: int) -> ElasticRunError:
    """Return what to raise where a stream has more samples than a program gave."""
    return ElasticRunError(
        f"{name} goes on after its {length} samples, which is what {LENGTHS} says. The "
        f"others would be left out in each epoch. Mend {LENGTHS}, or leave it out, and "
        "streams are counted once."
    )


class StreamReader:
    """Reads samples of one stream, each within a window of the last ones.

    Samples that are passed over are kept until they are asked for, or the window has
    gone by. An earlier one that the window may hold is read with what lies up to those
    that are kept. Anything else begins anew.

    Attributes:
        kept: What was read, by its index; whoever takes a sample takes it out of here.
            Readers of several streams may share one.
        start: The index of the stream's first sample.

    Args:
        name: What messages call the stream.
        length: Samples in it; `MAX_INDEX` if nobody knows.
        open_at: Returns an iterator over its samples from any one on.
        window: How far from the furthest one a sample may be asked for later. A part
            of up to that many samples is read at once.
        num_before: How many are read before the one where it begins, since these will
            be asked for, too; by default all that the window may hold.
        given_by: What has told its length, if nobody has counted it.
        start: The index of the stream's first sample.
        part: The numbers of the samples that it reads; all by default.
    """

    def __init__(
        self,
        name: str,
        length: int,
        open_at: Callable[[int], Iterator[Any]],
        *,
        window: int,
        num_before: int | None = None,
        given_by: str = "",
        start: int = 0,
        part: range | None = None,
    ) -> None:
        self._name = name
        self._length = length
        self._open_at = open_at
        self._window = window
        self._num_before = window - 1 if num_before is None else num_before
        self._given_by = given_by
        self._samples: Iterator[Any] | None = None
        self._has_read = False
        self._oldest = self._next = 0  # Only what lies between may be kept.
        self.kept: dict[int, Any] = {}
        self.start = start
        self._part = range(length) if part is None else part
        self._num_failures = 0  # In a row.

    def come_to(self, number: int) -> bool:
        """Read a sample that is not kept, and a few more.

        Returns:
            Whether all was read.
        """
        first = max(self._part.start, number - self._num_before)
        if number < self._oldest and self._next - number < 2 * self._window:
            self._read_gap(first)
            return False
        if self._samples is None or number < self._next:
            self._enter(first, number)
        end = self._part.stop
        if len(self._part) > self._window:
            # Large samples, of which windows are small, would fill memory.
            ahead = min(max(self._window // 4, 1), _AHEAD[self._has_read])
            end = min(end, number + ahead)
        self._has_read = True
        self._read_before(end)
        self.forget_before(number - self._window + 1)
        if self._next < self._part.stop:
            return False
        self._check_end()
        return True

    def forget_before(self, number: int | None = None) -> None:
        """Keep nothing before a sample any more, or (None) nothing at all."""
        number = self._next if number is None else number
        if number > self._oldest:
            indices = range(self.start + self._oldest, self.start + number)
            deque(map(self.kept.pop, indices, repeat(None)), maxlen=0)
            self._oldest = number

    def read_block(self, first: int, end: int) -> list[Any]:
        """Return the samples from one on and before another; fewer if it ends there.

        For a stream of unknown length, and for blocks one after another.
        """
        if self._samples is None or first < self._next:
            self._enter(first, end)
        else:
            self._read_before(end)
        samples = [self.kept.pop(number) for number in range(first, self._next)]
        self.forget_before()
        return samples

    def _enter(self, first: int, number: int) -> None:
        self._samples, self._has_read = None, False
        self.forget_before()
        self._oldest = self._next = first
        start = time.monotonic()
        self._read_before(number)
        seconds = time.monotonic() - start
        if seconds > _SLOW_SECONDS:
            logger.warning(
                "%s: to begin at sample %d took %.1f s, since everything before it "
                "must be read. Streams that can begin at an offset (plain files with "
                "an index, Parquet, token files) need no such time.",
                self._name,
                number,
                seconds,
            )

    def _read_gap(self, first: int) -> None:
        """Read what lies before the oldest sample that is kept, from one on."""
        place, end = (self._samples, self._next), self._oldest
        self._samples, self._next, self._oldest = None, first, first
        self._read_before(end)
        self._samples, self._next = place

    def _read_before(self, end: int) -> None:
        """Read on up to a number; what is read is kept."""
        while self._next < end:
            read: dict[int, Any] = {}
            failure = None
            try:
                if self._samples is None:
                    self._samples = iter(self._open_at(self._next))
                # Not one by one: a loop here would take longer than reading lines.
                indices = range(self.start + self._next, self.start + end)
                read.update(zip(indices, self._samples, strict=False))
            except ElasticRunError:
                raise
            except OSError as error:
                failure = error
            except Exception as error:
                raise ElasticRunError(
                    f"sample {self._next + len(read)} of {self._name} cannot be "
                    f"read: {error!r}. Mend the stream, or what reads it."
                ) from error
            self.kept.update(read)
            self._next += len(read)
            if read:
                self._num_failures = 0
            if failure is not None:
                self._wait_after(failure)
            elif self._next < end and self._length == MAX_INDEX:
                return
            elif self._next < end:
                told = self._given_by or "the count"
                raise ElasticRunError(
                    f"{self._name} ends after {self._next} samples, but {told} says "
                    f"{self._length}. It has changed, or it splits itself by rank or "
                    "worker. Give every replica and worker all samples. "
                    f"{_OTHER_LENGTH}"
                )

    def _wait_after(self, error: OSError) -> None:
        """Wait before another attempt where the storage fails for a while."""
        self._samples = None
        place = f"sample {self._next} of {self._name}"
        if isinstance(error, _LASTING) or self._num_failures == len(_WAIT_SECONDS):
            raise ElasticRunError(f"{place} cannot be read: {error}") from error
        wait = _WAIT_SECONDS[self._num_failures]
        self._num_failures += 1
        logger.warning("%s: %s; trying again in %g s", place, error, wait)
        time.sleep(wait)

    def _check_end(self) -> None:
        """Refuse a stream that has more samples than it should."""
        samples, self._samples = self._samples, None
        if (
            samples is None
            or self._part.stop < self._length
            or next(samples, self) is self
        ):
            return
        goes_on = f"{self._name} goes on after its {self._length} samples"
        if not self._given_by:
            raise ElasticRunError(
                f"{goes_on}. It has changed since they were counted. {_OTHER_LENGTH}"
            )
        if self._given_by == LENGTHS:
            raise more_than_lengths(self._name, self._length)
        _warn_of_more(goes_on, self._given_by)


class OpenBlocks:
    """The blocks that are open in one process, each with a reader of its own.

    Args:
        reader_of: Returns what reads from one index to another, at a sample there.
        starts: The indices of the blocks' first samples, and the end of the last one.
        window: As of `StreamReader`, in each lane.

    Attributes:
        pid: The process; a worker shares no open file with its parent.
    """

    def __init__(
        self,
        reader_of: Callable[[int, int, int], StreamReader],
        starts: Sequence[int],
        *,
        window: int,
        num_lanes: int,
    ) -> None:
        self.pid = os.getpid()
        self._reader_of = reader_of
        self._starts = starts
        self._window = window
        self._num_lanes = num_lanes
        self.kept: dict[int, Any] = {}  # What was read and not asked for, by index.
        self.readers: dict[int, StreamReader] = {}
        self._long: dict[int, None] = {}  # Of these the long ones, oldest first.
        self._read_blocks: dict[int, None] = {}  # Of what is kept, oldest first.

    def take(self, indices: list[int]) -> list[Any]:
        """Return what was read at indices, or read it now."""
        take, to_come = self.kept.pop, iter(indices)
        samples: list[Any] = []
        while len(samples) < len(indices):
            try:
                samples.extend(map(take, to_come))  # Lines take microseconds: no loop.
            except KeyError:
                missing = indices[len(samples)]
                self._read(missing)
                samples.append(take(missing))
        return samples

    def _read(self, index: int) -> None:
        """Read a sample that is not kept, and some that follow it."""
        block = bisect_right(self._starts, index) - 1
        reader = self.readers.get(block) or self._new_reader(block, index)
        if not reader.come_to(index - reader.start):
            return
        del self.readers[block]
        self._long.pop(block, None)
        # Nobody here takes what other replicas train. What is forgotten too early is
        # read again; what was just read is asked for now.
        self._read_blocks.pop(block, None)
        most = 3 * self._window * self._num_lanes
        while self._read_blocks and len(self.kept) + len(self._read_blocks) > most:
            oldest = next(iter(self._read_blocks))
            del self._read_blocks[oldest]
            begin, end = self._starts[oldest : oldest + 2]
            for number in range(max(begin, end - 2 * self._window), end):
                self.kept.pop(number, None)
        self._read_blocks[block] = None

    def _new_reader(self, block: int, index: int) -> StreamReader:
        """Open a block, at a sample in it.

        Those of up to a window are read at once, and hold no file open. Of longer ones
        few are open in each lane; what a resume has passed over may leave some behind.
        """
        begin, end = self._starts[block : block + 2]
        if end - begin > self._window:
            if len(self._long) >= 4 * self._num_lanes:
                oldest = next(iter(self._long))
                self.readers.pop(oldest).forget_before()
                del self._long[oldest]
            self._long[block] = None
        reader = self.readers[block] = self._reader_of(begin, end, index)
        reader.kept = self.kept
        return reader
