"""Kinds of streams: lines of text, tar shards, Parquet, tokens, shards in memory."""

from __future__ import annotations

import io
import itertools
import operator
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elasticrun.data.order.batches import check_size
from elasticrun.data.streams.index import STRIDE, Scan
from elasticrun.data.streams.paths import Paths, paths_of
from elasticrun.data.streams.streams import Streams, name_of
from elasticrun.errors import ElasticRunError
from elasticrun.logger import Logger

logger = Logger(__name__)

_BLOCK = 1 << 20  # Bytes that are searched for line ends at once.
_NEWLINE = 10
_ROWS_AT_ONCE = 512
_PACKED = (".gz", ".zst", ".bz2", ".xz")
# Bytes of a block: of a local file, where a seek costs little and small blocks mix the
# better, of up to `STRIDE` samples; in an object store so that requests stay few.
_LOCAL_BLOCK, _REMOTE_BLOCK = 2 << 20, 4 << 20
# In a tar shard, by WebDataset: a sample's member, and one that tells of the shard.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)")
_ABOUT = re.compile(r"__[^/]*__(/|$)")
_HEADER = 4096  # Bytes, or more, of a file of NumPy before its tokens.
_NPY = b"\x93NUMPY"
_without_end = operator.methodcaller("rstrip", "\r\n")


def open_file(name: str, ahead: int | None = None) -> IO[bytes]:
    """Open a file or a URL to read, decompressed by the end of its name.

    Args:
        ahead: Bytes that will be read from where reading begins. Of a URL they are one
            request. Without it fsspec asks for tens of megabytes at each.
    """
    if "://" not in name:
        _check_plain(name)
        if not name.endswith(_PACKED):
            return open(name, "rb")
    import fsspec

    files, path = fsspec.core.url_to_fs(name)
    file: Any = files.open(path, "rb", block_size=ahead, compression="infer")
    opened: IO[bytes] = file if file.seekable() else io.BufferedReader(file)
    return opened


def _check_plain(name: str) -> None:
    """Refuse a pipe, which would wait for a writer, and has data only once."""
    if not stat.S_ISREG(os.stat(name).st_mode):
        raise ElasticRunError(
            f"{name} is no plain file, but a pipe, a device or a directory. Data is "
            "read again after a restart, so it must be in a file."
        )


class _Member(tarfile.TarInfo):
    """A member whose header must be one: tarfile takes a torn one for the end."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(
                f"a header in it is torn or damaged ({error}), so members would be "
                "missing. Copy the file anew"
            ) from error


def begins_of(
    name: str, length: int, size: int, *, stride: int = STRIDE
) -> NDArray[np.int64]:
    """Return the samples at whose marks a file can be entered; none of a packed one.

    Args:
        stride: Samples from one mark to the next.
    """
    if name.endswith(_PACKED):
        return Scan(0).begins
    is_local = "://" not in name
    block = _LOCAL_BLOCK if is_local else _REMOTE_BLOCK
    num_strides = max(-(-block * length // (max(size, 1) * stride)), 1)
    if is_local:
        num_strides = min(num_strides, STRIDE // stride)
    return np.arange(0, length, num_strides * stride)


def skip_to(file: IO[bytes], offset: int) -> None:
    """Go to an offset from the beginning, by reading where a file cannot seek."""
    if file.seekable():
        file.seek(offset)
        return
    while offset and (read := file.read(min(offset, _BLOCK))):
        offset -= len(read)


class _Chained:
    """One function after another one."""

    def __init__(self, first: Callable[[Any], Any], then: Callable[[Any], Any]) -> None:
        self.__qualname__ = f"{name_of(first)} and {name_of(then)}"
        self._first = first
        self._then = then

    def __call__(self, read: Any) -> Any:
        return self._then(self._first(read))


class TextLines(Streams):
    """The lines of text files: one sample a line.

        train = TextLines("data/*.jsonl.gz", parse=json.loads)

    Files that end in .gz, .bz2, .xz or .zst (which needs the package zstandard) are
    decompressed. A plain file is entered at an offset, a compressed one by reading what
    lies before, which a long one should be spared: cut it into several.

    Args:
        paths: Files, patterns or URLs (of fsspec: s3://, gs://, https://).
        parse: From a line, without its end, to what is read; `json.loads` for JSON. It
            is called before `transform`, where a sample is delivered, too, and draws
            nothing at random.
        options: Those of `Streams`.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        parse: Callable[[str], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self._draws = transform is not None
        if parse is not None and transform is not None:
            transform = _Chained(parse, transform)
        super().__init__(paths_of(paths), transform=transform or parse, **options)

    has_near_marks = True

    @property
    def draws(self) -> bool:
        return self._draws

    def scan(self, stream: int) -> Scan:
        """Count the lines; a mark is an offset."""
        marks = [0]
        count, offset, last = 0, 0, _NEWLINE
        with open_file(self.names[stream]) as file:
            while block := file.read(_BLOCK):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
                ahead = len(marks) * STRIDE - count - 1  # Ends before the next mark.
                marks.extend((ends[ahead::STRIDE] + offset + 1).tolist())
                count += len(ends)
                offset += len(block)
                last = block[-1]
        count += last != _NEWLINE
        begins = begins_of(self.names[stream], count, offset)
        return Scan(count, np.array(marks, np.int64), begins=begins, size=offset)

    def open(self, stream: int, first: int) -> Iterator[Any]:
        number, offset = self.mark(stream, first)
        ahead = self.bytes_to_next_block(stream, first)
        with open_file(self.names[stream], ahead) as file:
            skip_to(file, int(offset))
            lines = io.TextIOWrapper(file, "utf-8", newline="\n")
            try:
                yield from map(
                    _without_end, itertools.islice(lines, first - number, None)
                )
            except UnicodeDecodeError as error:
                raise ElasticRunError(
                    f"{self.names[stream]}: {error}. The text must be UTF-8."
                ) from error

    def describe(self, index: int) -> str:
        """Return a line's name; its number counts from 1, as editors count."""
        stream, number = self.place(index)
        return f"line {number + 1} of {stream}"


class TarShards(Streams):
    """The samples of tar files, in WebDataset's convention.

    Members that follow each other and have one name up to the first dot of its last
    part are one sample: a dictionary from what comes after the dot, in lower case, to
    the bytes, and "__key__" to the name. Members without a dot, and such as `__meta__`,
    are none.

        shards = TarShards("s3://bucket/train-*.tar", transform=decode)

    Args:
        paths: Like those of `TextLines`. To enter a compressed file, all that lies
            before the sample is read.
        options: Those of `Streams`.
    """

    def __init__(self, paths: Paths, **options: Any) -> None:
        super().__init__(paths_of(paths), **options)

    stride = 4  # To pass over a sample takes as long as reading a hundred lines.
    has_near_marks = True

    @property
    def kind(self) -> str | None:
        own = super().kind  # Earlier versions kept other marks.
        return own and f"{own} by {self.stride}"

    def scan(self, stream: int) -> Scan:
        """Count the samples; a mark is the offset of the first member's header."""
        offsets = [offset for offset, _ in self._samples(stream, 0, None)]
        marks = np.array(offsets[:: self.stride] or [0], np.int64)
        size = sum(offsets[-1:])
        begins = begins_of(self.names[stream], len(offsets), size, stride=self.stride)
        return Scan(len(offsets), marks, begins=begins, size=size)

    def open(self, stream: int, first: int) -> Iterator[dict[str, Any]]:
        number, offset = self.mark(stream, first)
        passed = first - number
        ahead = self.bytes_to_next_block(stream, first)
        samples = self._samples(stream, int(offset), passed, ahead)
        for _, sample in itertools.islice(samples, passed, None):
            yield sample

    def _samples(
        self, stream: int, offset: int, first: int | None, ahead: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the offset of each sample from one on, and its content.

        Args:
            first: How many there are before the first one whose content is read; None
                to read none.
            ahead: As of `open_file`.
        """
        begin, number = offset, -1
        sample: dict[str, Any] = {"__key__": ""}
        with open_file(self.names[stream], ahead) as file:
            skip_to(file, offset)
            mode: Any = "r:" if file.seekable() else "r|"
            with tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as shard:
                for member in shard:
                    if not member.isfile():
                        if first is None and not member.isdir():
                            logger.warning(
                                "%s: %s is left out: it is a link or a device",
                                self.names[stream],
                                member.name,
                            )
                        continue
                    named = _NAME.fullmatch(member.name)
                    if named is None or _ABOUT.match(member.name):
                        continue
                    key, kind = named[1], named[2].lower()
                    if key != sample["__key__"]:
                        if len(sample) > 1:
                            yield begin, sample
                        begin, sample = member.offset, {"__key__": key}
                        number += 1
                    if kind in sample:
                        raise ElasticRunError(
                            f"{self.names[stream]} has two members {member.name} in a "
                            "row, which would be one sample. Name them differently."
                        )
                    content = None
                    if first is not None and number >= first:
                        content = shard.extractfile(member)
                    sample[kind] = None if content is None else content.read()
                    shard.members = []  # type: ignore[attr-defined]  # It would grow.
        if len(sample) > 1:
            yield begin, sample


class ParquetRows(Streams):
    """The rows of Parquet files, as dictionaries; needs pyarrow.

    Lengths come from the files' footers; a file is entered at a row group.

    Args:
        paths: Like those of `TextLines`.
        columns: Which ones to read; None for all.
        options: Those of `Streams`.
    """

    def __init__(
        self, paths: Paths, *, columns: list[str] | None = None, **options: Any
    ) -> None:
        super().__init__(paths_of(paths), **options)
        if isinstance(columns, str):
            raise TypeError(f"columns={columns!r} is one text. Give [{columns!r}].")
        self._columns = columns

    def scan(self, stream: int) -> Scan:
        """Count the rows; a block is a row group."""
        from pyarrow import parquet

        with open_file(self.names[stream]) as file:
            about = parquet.ParquetFile(file).metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        rows = np.array([0, *(group.num_rows for group in groups)])
        begins = np.unique(np.cumsum(rows)[:-1])  # A group may be empty.
        size = sum(group.total_byte_size for group in groups)
        return Scan(int(rows.sum()), begins=begins[begins < rows.sum()], size=size)

    def open(self, stream: int, first: int) -> Iterator[dict[str, Any]]:
        from pyarrow import parquet

        # Arrow says itself how much it wants.
        with open_file(self.names[stream], _BLOCK) as file:
            rows = parquet.ParquetFile(file)
            missing = set(self._columns or ()) - set(rows.schema_arrow.names)
            if missing:
                raise ElasticRunError(
                    f"{self.names[stream]} has no columns {sorted(missing)}. It has "
                    f"{rows.schema_arrow.names}."
                )
            group = 0
            while first and first >= rows.metadata.row_group(group).num_rows:
                first -= rows.metadata.row_group(group).num_rows
                group += 1
            groups = range(group, rows.num_row_groups)
            for batch in rows.iter_batches(
                _ROWS_AT_ONCE, row_groups=groups, columns=self._columns
            ):
                if first >= batch.num_rows:
                    first -= batch.num_rows
                    continue
                yield from batch.slice(first).to_pylist()
                first = 0


class TokenFiles(Streams):
    """Sequences of tokens from binary files.

    Sample j of a file has its tokens from j * length on, and one more, the target of
    the last one; what is left at the end of a file is left out.

    Args:
        paths: Like those of `TextLines`. Files of one NumPy type, nothing else in them,
            or of `numpy.save`'s, with a type of their own.
        length: Tokens in a sequence, without that one more.
        dtype: The type of a token.
        options: Those of `Streams`.
    """

    def __init__(
        self, paths: Paths, length: int, *, dtype: Any = np.uint16, **options: Any
    ) -> None:
        super().__init__(paths_of(paths), **options)
        self._length = check_size("length", length)
        self._dtype = np.dtype(dtype)

    block = STRIDE  # Where lengths are given.

    @property
    def kind(self) -> str | None:
        own = super().kind
        return own and f"{own} {self._length} {self._dtype}"

    def scan(self, stream: int) -> Scan:
        name = self.names[stream]
        with open_file(name) as file:
            dtype, begin, number = self._header(name, file)
            size = file.seek(0, os.SEEK_END) - begin
        if number is None and size % dtype.itemsize:
            raise ElasticRunError(
                f"{name} has {size} bytes, which are no whole number of tokens of type "
                f"{dtype}. Give the dtype that it was written with, or copy it anew if "
                "it is torn."
            )
        num_tokens = size // dtype.itemsize if number is None else number
        if num_tokens * dtype.itemsize > size:
            raise ElasticRunError(
                f"{name} has {size} bytes of tokens, and its header says that there "
                f"are {num_tokens} of {dtype}, so it is torn. Copy the file anew."
            )
        count = max(num_tokens - 1, 0) // self._length
        return Scan(count, begins=begins_of(name, count, size))

    def open(self, stream: int, first: int) -> Iterator[Tensor]:
        name, last = self.names[stream], self.next_block(stream, first)
        with open_file(name, _HEADER) as file:
            dtype, begin, number = self._header(name, file)
        size = self._length * dtype.itemsize
        with open_file(name, None if last is None else (last - first) * size) as file:
            file.seek(begin + first * size)
            sequence = file.read(dtype.itemsize)
            for at in itertools.count((first + 1) * self._length, self._length):
                if number is not None and at >= number:
                    return  # What follows in the file is no part of the array.
                if len(read := file.read(size)) < size:
                    return
                sequence += read
                tokens = np.frombuffer(sequence, dtype).astype(np.int64)
                yield torch.from_numpy(tokens)
                sequence = read[-dtype.itemsize :]

    def _header(self, name: str, file: IO[bytes]) -> tuple[Any, int, int | None]:
        """Return the type of the tokens, the offset of the first one, and how many.

        None where there is no header, and they are all that the file has.
        """
        if file.read(len(_NPY)) != _NPY:
            return self._dtype, 0, None
        file.seek(0)
        headers = np.lib.format
        is_first = headers.read_magic(file) == (1, 0)  # Later ones are alike.
        read = (
            headers.read_array_header_1_0 if is_first else headers.read_array_header_2_0
        )
        shape, _, dtype = read(file)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ElasticRunError(
                f"{name} has an array of shape {shape} and type {dtype}, not a row of "
                "tokens. Save one dimension of whole numbers."
            )
        return dtype, file.tell(), shape[0]


class ResidentShards(Streams):
    """Shards of which each replica loads its part once, and keeps it.

        shards = ResidentShards(
            lambda n: torch.load(f"shard-{n}.pt", map_location=elasticrun.device()),
            lengths=[50_000] * 64,
        )

    Which shards a replica loads depends on its rank and the world size alone, so it
    holds its share of the data in all epochs. They are loaded when a loader is made:
    before a rescaling, while the old replicas still train. At the end of unequal
    shards, a replica without a sample also loads another one's shard. With fewer lanes
    than replicas each one loads everything.

    Args:
        load: From the number of a shard to its samples, in something that is indexed.
        lengths: Samples of each shard.
        options: Those of `Streams`.
    """

    def __init__(
        self, load: Callable[[int], Any], lengths: Sequence[int], **options: Any
    ) -> None:
        names = [f"shard {number}" for number in range(len(lengths))]
        super().__init__(names, lengths=lengths, **options)
        self._load = load
        self._held: dict[int, Any] = {}

    keeps_streams = True

    def prepare(self, rank: int, world_size: int) -> None:
        super().prepare(rank, world_size)
        are_shared = self.lanes.num_lanes < world_size
        for stream, lane in enumerate(self.lanes.lane_of_stream):
            if are_shared or lane % world_size == rank:
                self._shard(stream)

    def open(self, stream: int, first: int) -> Iterator[Any]:
        shard = self._shard(stream)
        return (shard[number] for number in range(first, len(shard)))

    def _shard(self, stream: int) -> Any:
        if stream not in self._held:
            self._held[stream] = self._load(stream)
        return self._held[stream]
