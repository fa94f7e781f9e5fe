"""`Streams`: a data set read in sequence, which can begin at any sample."""

from __future__ import annotations

import copy
import itertools
import operator
import os
import re
import reprlib
import zlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from elasticrun.checkpoint.states.generators import program_generators_kept
from elasticrun.checkpoint.storage.place import parse_place
from elasticrun.data.order.batches import check_size
from elasticrun.data.order.lanes import Blocks, Lanes
from elasticrun.data.order.permutation import MAX_INDEX
from elasticrun.data.streams.in_lanes import InLanes
from elasticrun.data.streams.index import (
    STRIDE,
    Contents,
    Index,
    Scan,
    digest_of,
    scan_all,
    stamps_of,
)
from elasticrun.data.streams.stream_reader import (
    LENGTHS,
    OpenBlocks,
    StreamReader,
    more_than_lengths,
)
from elasticrun.errors import ElasticRunError, counted
from elasticrun.job.current import current_job
from elasticrun.logger import Logger

logger = Logger(__name__)

_NUM_FIRST = 8  # Samples by which data is known again.
_BLOCKS_IN_LANE = 4  # Of little data, at least.
_MOST_BLOCKS = 1 << 17  # So many are dealt in some milliseconds.


class Streams(InLanes):
    """A data set of streams, each of which is read in sequence from any sample on.

    An `AdaptiveDataLoader` reads its streams through a fixed number of lanes, each by
    one replica and one worker at a time, and resumes at the sample at any number of
    replicas and workers. With `shuffle=True`, each loop deals the blocks of the streams
    to the lanes anew, and mixes the samples in each window of a lane. A block is what
    can be entered at once: some hundred lines, a row group, or a whole stream.

    A subclass says how a stream is opened and, unless the lengths are given, counted:

        class Records(Streams):
            block = 500  # It can be entered anywhere: so many are read in a row.

            def open(self, stream, first):
                with open(self.names[stream], "rb") as file:
                    file.seek(first * 100)
                    while record := file.read(100):
                        yield record

            def count(self, stream):
                return os.path.getsize(self.names[stream]) // 100

    Streams are counted when a loader is made; every replica needs all of them.

    Args:
        names: What messages call the streams: their files, mostly.
        lanes: How many are read side by side. With as many as samples in a batch, or
            more, the replicas' shares are nearly even; more cost open files, and memory
            for their windows.
        window: Samples that are mixed, in all lanes together; each has its part of it,
            1000 at most. So many are in memory, in all replicas together.
        window_bytes: The most bytes of samples that are mixed, where counting the
            streams shows how large they are.
        transform: From what is read to the sample, where it is delivered; its random
            draws are seeded as those of any data set (`seed_each`).
        skip_broken: Leave samples out for which `transform` raises. All are tried when
            they are counted, which takes as long as a pass over them; `num_broken` says
            how many there are.
        lengths: Samples of each stream, if they are known. "unknown" for loops over
            streams that are not counted, see `Uncounted`.
        index: A directory to keep counted lengths in; beside the checkpoints, if these
            are in a directory, without one. A file with another size or time is
            counted again.

    Raises:
        ValueError: There are no streams, or an argument is out of range.
        ElasticRunError: While it is read: a stream has other samples than it had, or
            cannot be read, or `transform` raises.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        lanes: int = 64,
        window: int = 16_384,
        window_bytes: int = 32 << 20,
        transform: Callable[[Any], Any] | None = None,
        skip_broken: bool = False,
        lengths: Sequence[int] | Literal["unknown"] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(names, str):
            raise TypeError(f"names={names!r} is one text. Give a list of the streams.")
        self.names = list(names)
        if not self.names:
            raise ValueError(
                f"{type(self).__name__} has no streams. Look at the paths it was given."
            )
        self.has_unknown_lengths = isinstance(lengths, str) and lengths == "unknown"
        if skip_broken and (lengths is not None or transform is None):
            raise ValueError(
                "skip_broken=True leaves out samples for which transform (or parse) "
                "raises, and counts the others. So give transform or parse, and no "
                "lengths."
            )
        self.transform = transform
        self.skip_broken = skip_broken
        self._num_lanes = check_size("lanes", lanes)
        self._window = check_size("window", window)
        self._window_bytes = check_size("window_bytes", window_bytes)
        self._scans = None
        self._given_by = ""
        if not (lengths is None or self.has_unknown_lengths):
            numbers = _checked_lengths(lengths, self.names)
            self._scans = list(map(self._scan_of, numbers))
            self._given_by = LENGTHS
        self._is_shuffled = True
        self._index = index
        self._open: OpenBlocks | None = None  # In this process.

    def options(self) -> dict[str, Any]:
        """Return what another data set over the same streams is made with."""
        return {
            "names": self.names,
            "lanes": self._num_lanes,
            "window": self._window,
            "window_bytes": self._window_bytes,
            "index": self._index,
            "lengths": "unknown" if self.has_unknown_lengths else None,
        }

    # What a subclass says.

    first_mark: Any = 0
    stride = STRIDE  # Samples from one mark to the next.
    # Samples that are read in a row, where a stream can be entered at any of them; a
    # stream of which what lies before must be read has none.
    block: int | None = None
    # Whether it takes little time to pass over the samples behind a mark.
    has_near_marks = False
    # Whether each replica is to read the same streams in each loop.
    keeps_streams = False

    @abstractmethod
    def open(self, stream: int, first: int) -> Iterator[Any]:
        """Return an iterator over a stream's samples from number `first` on."""

    def count(self, stream: int) -> int:
        """Return how many samples a stream has; by default, by reading it."""
        return sum(1 for _ in self.open(stream, 0))

    def scan(self, stream: int) -> Scan:
        """Return how many samples a stream has, and marks to enter it by."""
        return self._scan_of(self.count(stream))

    def _scan_of(self, length: int) -> Scan:
        begins = np.arange(0, length, self.block) if self.block else Scan(0).begins
        return Scan(length, begins=begins)

    @property
    def draws(self) -> bool:
        return self.transform is not None

    @property
    def kind(self) -> str | None:
        """How streams are counted: scans of another kind are not taken for these.

        None if nothing tells these streams from others: then no scans are kept.
        """
        kind = type(self).__qualname__
        if not self.skip_broken:
            return kind
        digest = digest_of(self.transform)
        return None if digest is None else f"{kind} without what {digest} refuses"

    @cached_property
    def stamps(self) -> list[str]:
        """What shows that the content of each stream is the same; "" without."""
        return [""] * len(self.names) if self.kind is None else stamps_of(self.names)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each stream; 1 of each where one is no file."""
        sizes = [stamp.partition(" ")[0] for stamp in self.stamps]
        if not all(map(str.isdigit, sizes)):  # A storage may tell no size.
            return np.ones(len(self.names), np.int64)
        return np.array(sizes).astype(np.int64)

    # What it knows by then.

    @property
    def scans(self) -> list[Scan]:
        """The length and the marks of each stream; counted at the first use."""
        self.count_all()
        assert self._scans is not None
        return self._scans

    def count_all(self) -> None:
        """Count the streams, unless that was done."""
        if self.has_unknown_lengths:
            raise TypeError(
                f'{type(self).__name__} was given lengths="unknown", which is for '
                "loops over a loader of it alone. Leave lengths out, and streams are "
                "counted once."
            )
        if self._scans is not None:
            return
        with program_generators_kept():  # Data sets and transforms may draw.
            self._scans = self.scan_all()
        if self.num_broken and current_job().rank == 0:
            logger.warning(
                "%s: %s left out, for which %s raises.",
                type(self).__name__,
                counted(self.num_broken, "broken sample"),
                name_of(self.transform),
            )

    def scan_all(self) -> list[Scan]:
        """Return the scan of each stream, kept or made now."""
        job = current_job()
        kind = self.kind
        return scan_all(
            self.names,
            self.stamps,
            self._scan_tried if self.skip_broken else self.scan,
            index=None if kind is None else index_in(self._index, kind),
            rank=job.rank,
            world_size=job.world_size,
        )

    def _scan_tried(self, stream: int) -> Scan:
        """Count the samples that are not broken; marks are still those of all."""
        scan = self.scan(stream)
        broken = [
            number
            for number, read in enumerate(self.open(stream, 0))
            if self._is_broken(read)
        ]
        length = scan.length - len(broken)
        begins = scan.begins - np.searchsorted(broken, scan.begins)
        begins = np.unique(begins[begins < length])
        return Scan(length, scan.marks, np.array(broken, np.int64), begins, scan.size)

    def _is_broken(self, read: Any) -> bool:
        assert self.transform is not None
        try:
            self.transform(read)
        except (ConnectionError, TimeoutError, MemoryError):
            raise  # Which says nothing about the sample.
        except Exception:
            return True
        return False

    @property
    def num_broken(self) -> int:
        """How many samples are left out, in all streams."""
        return sum(len(scan.broken) for scan in self.scans)

    @cached_property
    def lanes(self) -> Lanes:
        lengths = np.array([scan.length for scan in self.scans], np.int64)
        window, size = self._window, sum(scan.size for scan in self.scans)
        if size:
            window = min(
                window, max(self._window_bytes * int(lengths.sum()) // size, 1)
            )
        blocks = None if self.keeps_streams else self._blocks()
        lanes = Lanes(lengths, self._num_lanes, window=window, blocks=blocks)
        lanes.checksum = zlib.crc32(self.identity.encode(), lanes.checksum)
        for scan in self.scans:
            lanes.checksum = zlib.crc32(scan.broken.tobytes(), lanes.checksum)
        return lanes

    def _blocks(self) -> Blocks:
        """Return all blocks, several as one where there are very many.

        Of little data they are cut smaller, so that lanes are nearly even: else samples
        of a file's short last block would never come late.
        """
        scans, can_be_cut = self.scans, self.block is not None or self.has_near_marks
        step = 1 + sum(len(scan.begins) for scan in scans) // _MOST_BLOCKS
        total = sum(scan.length for scan in scans)
        most = max(total // (_BLOCKS_IN_LANE * self._num_lanes), 1)
        begins, are_entered, start = [], [], 0
        for name, scan in zip(self.names, scans, strict=True):
            if scan.length:
                is_entered = len(scan.begins) > 0
                own = scan.begins[::step] if is_entered else np.zeros(1, np.int64)
                is_cut = can_be_cut and is_entered and "://" not in name
                if is_cut and np.diff(own, append=scan.length).max() > most:
                    own = np.arange(0, scan.length, most)
                begins.append(own + start)
                are_entered.append(np.full(len(own), is_entered))
            start += scan.length
        none: Any = np.zeros(0, np.int64)
        return Blocks(
            np.concatenate([none, *begins]),
            np.concatenate([none.astype(np.bool_), *are_entered]),
        )

    @property
    def identity(self) -> str:
        """What tells these streams from others of the same lengths."""
        names = "\0".join(name.rpartition("/")[2] for name in self.names)
        return names + self.beginning

    @cached_property
    def _starts(self) -> list[int]:
        return [int(start) for start in self.lanes.starts]

    def mark(self, stream: int, first: int) -> tuple[int, Any]:
        """Return the last mark at or before a sample: its number, and its row.

        In streams that were not counted, that of the beginning.
        """
        marks = () if self._scans is None else self._scans[stream].marks
        if not len(marks):
            return 0, self.first_mark
        row = first // self.stride
        return row * self.stride, marks[row]

    def next_block(self, stream: int, first: int) -> int | None:
        """Return where the block after a sample begins; None where nobody knows."""
        begins = () if self._scans is None else self._scans[stream].begins
        at = int(np.searchsorted(begins, first, side="right"))
        return int(begins[at]) if at < len(begins) else None

    def bytes_to_next_block(self, stream: int, first: int) -> int | None:
        """Return how many bytes it is from a sample's mark on; None as above.

        For marks that are offsets.
        """
        last = self.next_block(stream, first)
        if last is None:
            return None
        return int(self.mark(stream, last)[1] - self.mark(stream, first)[1]) or None

    def without_broken(self, stream: int, first: int) -> Iterator[Any]:
        """Return an iterator over the samples that count, from number `first` on."""
        if not self.skip_broken:
            return self.open(stream, first)
        broken = self.scans[stream].broken
        begin = _number_in_all(broken, first)
        left_out = set(broken.tolist())
        return (
            sample
            for number, sample in enumerate(self.open(stream, begin), begin)
            if number not in left_out
        )

    @property
    def contents(self) -> Contents:
        names = [name.rpartition("/")[2] for name in self.names]
        lengths: list[int | None] = [None] * len(names)
        if self._scans is not None:
            lengths = [scan.length for scan in self._scans]
        # Nobody asks a storage for them only for this.
        stamps = vars(self).get("stamps", [""] * len(names))
        return [*zip(names, lengths, stamps, strict=True)]

    def place(self, index: int) -> tuple[str, int]:
        stream = bisect_right(self._starts, index) - 1
        number = index - self._starts[stream]
        return self.names[stream], _number_in_all(self.scans[stream].broken, number)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples at indices."""
        if self._open is None or self._open.pid != os.getpid():
            blocks, lanes = self.lanes.blocks, self.lanes
            starts = self._starts
            if blocks is not None and self._is_shuffled:
                starts = [*blocks.begins.tolist(), len(self)]
            self._open = OpenBlocks(
                self._reader_of, starts, window=lanes.window, num_lanes=lanes.num_lanes
            )
        samples = self._open.take(indices)
        if self.transform is None:
            return samples
        delivered: list[Any] = []
        try:
            delivered.extend(map(self.transform, samples))  # Faster than a loop.
        except Exception as error:
            name = self.describe(indices[len(delivered)])
            raise transform_error(
                name, self.transform, error, was_tried=self.skip_broken
            ) from error
        return delivered

    def _reader_of(self, begin: int, end: int, index: int) -> StreamReader:
        """Return what reads a block, at a sample in it."""
        window, stream = self.lanes.window, bisect_right(self._starts, begin) - 1
        num_before = window - 1 if self._is_shuffled else 0
        # The loop, or a resume, begins in the middle of blocks. Where that takes less
        # time than to read what lies before in the window, this is read when asked.
        scan, is_local = self.scans[stream], "://" not in self.names[stream]
        is_near = len(scan.begins) > 0 and len(scan.marks) > 0 and self.stride < window
        if is_near and is_local and index - begin >= window:
            num_before = 0
        start = self._starts[stream]
        return StreamReader(
            self.names[stream],
            scan.length,
            lambda first: self.without_broken(stream, first),
            window=window,
            num_before=num_before,
            given_by=self._given_by,
            start=start,
            part=range(begin - start, end - start),
        )

    def apart(self, *, is_shuffled: bool) -> Streams:
        own = copy.copy(self)
        own._is_shuffled = is_shuffled
        return own

    def prepare(self, rank: int, world_size: int) -> None:
        """Refuse samples of streams that are said to have none: nobody opens these."""
        if self._given_by != LENGTHS:
            return
        with program_generators_kept():
            for stream in range(rank, len(self.names), world_size):
                if self.scans[stream].length == 0:
                    name, open_at = self.names[stream], partial(self.open, stream)
                    reader = StreamReader(name, MAX_INDEX, open_at, window=1)
                    if reader.read_block(0, 1):
                        raise more_than_lengths(name, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


def transform_error(
    name: str, transform: Any, error: Exception, *, was_tried: bool = False
) -> ElasticRunError:
    """Return what to raise where a transform raises for a sample."""
    remedy = "Repair it, or leave such samples out with skip_broken=True."
    if was_tried:
        remedy = (
            "It did not when the samples were counted: start anew, with another index."
        )
    return ElasticRunError(f"{name}: {name_of(transform)} raised {error!r}. {remedy}")


def text_of(samples: Iterable[Any]) -> str:
    """Return what the first of some samples are as text, and a checksum of it.

    Addresses of objects are left out.
    """
    first = list(itertools.islice(samples, _NUM_FIRST))
    text = re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(first))
    return f"{text[:80]} ({zlib.crc32(text.encode()):08x})"


def name_of(function: Any) -> str:
    """Return what a function is called."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _checked_lengths(lengths: Any, names: Sequence[str]) -> list[int]:
    """Return the lengths that a program gives."""
    try:
        numbers = list(map(operator.index, lengths))
    except TypeError:
        numbers = []
    if len(numbers) != len(names) or min(numbers) < 0:
        raise ValueError(
            f'lengths={reprlib.repr(lengths)} is neither "unknown" nor a number from 0 '
            f"up for each of {len(names)} streams, the first of which is {names[0]}. "
            "Leave lengths out, and streams are counted once."
        )
    return numbers


def _number_in_all(broken: NDArray[np.int64], number: int) -> int:
    """Return the number among all samples of the one that is `number` without broken.

    Args:
        broken: The numbers among all of those that are left out, in order.
    """
    good_before = broken - np.arange(len(broken))
    return number + int(np.searchsorted(good_before, number, side="right"))


def index_in(directory: str | os.PathLike[str] | None, kind: str) -> Index | None:
    """Return where scans are kept: as said, else beside checkpoints in a directory."""
    if directory is not None:
        return Index(Path(directory), kind)
    checkpoint_dir = current_job().settings.checkpoint_dir
    place = None if checkpoint_dir is None else parse_place(checkpoint_dir)
    return Index(place / "streams", kind) if isinstance(place, Path) else None
