"""Reading one stream nearly in sequence."""

from __future__ import annotations

import gzip
import io
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from elasticrun.data.order.batches import MAX_INDEX
from elasticrun.errors import ElasticRunError

logger = logging.getLogger(__name__)

_AHEAD = 16  # Samples that are read at once.
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


class StreamReader:
    """Reads samples of one stream, each within a window of the last ones.

    Samples that are passed over are kept until they are asked for, or the window has
    gone by. Anything else begins anew at the window's first sample.

    Attributes:
        kept: What was read, by its number; whoever takes a sample takes it out of here.

    Args:
        name: What messages call the stream.
        length: Samples in it; `MAX_INDEX` if nobody knows.
        open_at: Returns an iterator over its samples from any one on.
        window: How far from the furthest one a sample may be asked for later. A stream
            of up to that many samples is read at once.
        num_before: Of these, how many may lie before the first one that is asked for.
        is_counted: Whether it ends after its length.
    """

    def __init__(
        self,
        name: str,
        length: int,
        open_at: Callable[[int], Iterator[Any]],
        *,
        window: int,
        num_before: int | None = None,
        is_counted: bool = True,
    ) -> None:
        self._name = name
        self._length = length
        self._open_at = open_at
        self._window = window
        self._num_before = window - 1 if num_before is None else num_before
        self._is_counted = is_counted
        self._samples: Iterator[Any] | None = None
        self._next = 0
        self.kept: dict[int, Any] = {}
        self._num_failures = 0  # In a row.

    @property
    def is_at_end(self) -> bool:
        """Whether all was read, and asked for."""
        return self._next == self._length and not self.kept

    def come_to(self, number: int) -> None:
        """Read a sample that is not kept, and a few more.

        Raises:
            ElasticRunError: The stream has fewer or more samples than it had, or cannot
                be read.
        """
        kept = self.kept
        if self._samples is None or number < self._next:
            self._enter(max(0, number - self._num_before), number)
        is_short = self._length <= self._window
        ahead = self._length if is_short else min(self._window, _AHEAD)
        self._read_before(min(number + ahead, self._length))
        gone = number - self._window
        while kept and (oldest := next(iter(kept))) <= gone:
            del kept[oldest]
        if self._next == self._length and self._samples is not None:
            self._check_end()

    def read_block(self, first: int, end: int) -> list[Any]:
        """Return the samples from one on and before another; fewer if it ends there.

        For a stream of unknown length, and for blocks one after another.
        """
        if self._samples is None or first < self._next:
            self._enter(first, end)
        else:
            self._read_before(end)
        samples = [self.kept[number] for number in range(first, self._next)]
        self.kept.clear()
        return samples

    def _enter(self, first: int, number: int) -> None:
        self._samples = None
        self.kept.clear()
        self._next = first
        start = time.monotonic()
        self._read_before(number)
        seconds = time.monotonic() - start
        if seconds > _SLOW_SECONDS:
            logger.warning(
                "%s: entering it at sample %d took %.1f s, since what lies before is "
                "read, too. Streams that can be entered by an offset (plain files with "
                "an index, Parquet, token files) need no such time.",
                self._name,
                number,
                seconds,
            )

    def _read_before(self, end: int) -> None:
        """Read on up to a number; what is read is kept."""
        kept = self.kept
        while self._next < end:
            had = len(kept)
            failure = None
            try:
                if self._samples is None:
                    self._samples = iter(self._open_at(self._next))
                # Not one by one: a loop here would take longer than reading lines.
                kept.update(zip(range(self._next, end), self._samples, strict=False))
            except ElasticRunError:
                raise
            except OSError as error:
                failure = error
            except Exception as error:
                raise ElasticRunError(
                    f"sample {self._next + len(kept) - had} of {self._name} cannot be "
                    f"read: {error!r}. Mend the stream, or what reads it."
                ) from error
            num_read = len(kept) - had
            self._next += num_read
            if num_read:
                self._num_failures = 0
            if failure is not None:
                self._wait_after(failure)
            elif self._next < end and self._length == MAX_INDEX:
                return
            elif self._next < end:
                raise ElasticRunError(
                    f"{self._name} ends after {self._next} samples, but had "
                    f"{self._length} when they were counted. It has changed, or it "
                    "depends on the rank or the worker that reads it, as a data set "
                    "does that shares itself out. Give the whole of it to every "
                    "replica, and start anew if the data has changed."
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
        """Refuse a stream that has more samples than were counted."""
        samples, self._samples = self._samples, None
        assert samples is not None
        if self._is_counted and next(samples, self) is not self:
            raise ElasticRunError(
                f"{self._name} goes on after its {self._length} samples. It has "
                "changed since they were counted. Start anew with another checkpoint "
                "directory."
            )
