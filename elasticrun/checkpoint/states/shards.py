"""Finds and reads the chunks of a tensor that several replicas wrote.

The state's file describes its tensors, and says where each chunk is. The file
`NAME.rank-R` holds the chunks of rank R as raw bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from elasticrun.checkpoint.files.durable import DamagedFileError
from elasticrun.checkpoint.states.nested import map_paths
from elasticrun.checkpoint.states.state import replica_file_name
from elasticrun.errors import CheckpointError

OpenFile = Callable[[str], BinaryIO]

ALIGNMENT = 64  # Of a chunk in its file, so that any kind of number could be mapped.
_MARK = "elasticrun.shards"
_FORMAT = 1


class Chunk(NamedTuple):
    """One block of a tensor, and where its bytes are.

    Attributes:
        start: Its first byte there.
        offsets: Its first index in each dimension of the tensor.
    """

    rank: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is cut into chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class SavedState:
    """The content of the file of a sharded state.

    Attributes:
        values: The state, with None in the place of each of them.
        tensors: Them, by their paths in it, as `map_paths` makes these.
    """

    values: Any
    tensors: Mapping[str, SavedTensor]

    def encode(self) -> dict[str, Any]:
        """Return it as plain values; the many numbers of the chunks as one tensor."""
        numbers = [
            number
            for each in self.tensors.values()
            for rank, start, offsets, sizes in each.chunks
            for number in (rank, start, *offsets, *sizes)
        ]
        tensors = {
            path: (str(each.dtype).removeprefix("torch."), each.shape, len(each.chunks))
            for path, each in self.tensors.items()
        }
        return {
            _MARK: _FORMAT,
            "tensors": tensors,
            "chunks": torch.tensor(numbers, dtype=torch.int64),
            "values": self.values,
        }

    @classmethod
    def decode(cls, values: Any) -> SavedState | None:
        """Return what `encode` made these values from, None for any others."""
        if not isinstance(values, dict) or _MARK not in values:
            return None
        if values[_MARK] != _FORMAT:
            raise CheckpointError(
                f"the state has the format {values[_MARK]!r} of sharded states, but "
                f"this elasticrun reads {_FORMAT}. Go on with the one that wrote it."
            )
        try:
            numbers = iter(values["chunks"].tolist())
            tensors = {
                path: _decode_tensor(dtype, size, num_chunks, numbers)
                for path, (dtype, size, num_chunks) in values["tensors"].items()
            }
            return cls(values["values"], tensors)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DamagedFileError(f"it describes no sharded state: {error!r}") from (
                error
            )


def _decode_tensor(
    dtype_name: str, size: tuple[int, ...], num_chunks: int, numbers: Iterator[int]
) -> SavedTensor:
    dtype = getattr(torch, dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is no dtype")
    chunks = []
    for _ in range(num_chunks):
        row = list(islice(numbers, 2 + 2 * len(size)))
        box = tuple(row[2:])
        chunk = Chunk(row[0], row[1], box[: len(size)], box[len(size) :])
        ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
        if min(row) < 0 or any(e > w for e, w in zip(ends, size, strict=True)):
            raise ValueError(f"{chunk} lies outside of {size}")
        chunks.append(chunk)
    # Chunks that overlapped and left a hole would add up, too; none are written.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the chunks do not fill {size}")
    return SavedTensor(dtype, tuple(size), chunks)


class ShardReader:
    """Reads chunks of one state; a context manager, which closes their files.

    All that reads raises a CheckpointError if a file is missing, damaged or too short.

    Args:
        open_file: Opens a file of the checkpoint once its checksum was found right.
    """

    def __init__(self, name: str, saved: SavedState, open_file: OpenFile) -> None:
        self._name = name
        self._saved = saved
        self._open_file = open_file
        self._files: dict[int, BinaryIO] = {}
        self._closing = ExitStack()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def open(self, ranks: set[int]) -> None:
        """Open and check the files of these ranks; each is read whole for that."""
        for rank in sorted(ranks - self._files.keys()):
            name = replica_file_name(self._name, rank)
            try:
                file = self._open_file(name)
            except KeyError as error:
                raise DamagedFileError(
                    f"the state {self._name!r} has a part in {name!r}, but the "
                    "checkpoint has no such file. Start the job again with another "
                    "checkpoint, or remove this one."
                ) from error
            self._files[rank] = self._closing.enter_context(file)

    def read(
        self, path: str, number: int, offsets: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        """Return a box of a tensor's chunk; only its rows are read."""
        saved = self._saved.tensors[path]
        chunk = saved.chunks[number]
        self.open({chunk.rank})
        shape = (*lengths[:1], *chunk.sizes[1:])
        row = saved.dtype.itemsize * math.prod(chunk.sizes[1:])
        start = chunk.start + (offsets[0] * row if offsets else 0)
        rows = self._read_bytes(chunk.rank, start, (lengths[0] if lengths else 1) * row)
        box = rows.view(saved.dtype).view(shape)
        for dimension in range(1, len(lengths)):
            box = box.narrow(dimension, offsets[dimension], lengths[dimension])
        return box

    def _read_bytes(self, rank: int, start: int, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        file = self._files[rank]
        file.seek(start)
        data = bytearray(num_bytes)
        # A buffered file, which reads on until that is full or the file ends.
        if file.readinto(data) < num_bytes:  # type: ignore[attr-defined]
            raise DamagedFileError(
                f"{replica_file_name(self._name, rank)} ends before byte "
                f"{start + num_bytes}, where the state {self._name!r} has a part."
            )
        return torch.frombuffer(data, dtype=torch.uint8)

    def read_whole(self, path: str) -> Tensor:
        saved = self._saved.tensors[path]
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for number, chunk in enumerate(saved.chunks):
            box = self.read(path, number, [0] * len(chunk.sizes), chunk.sizes)
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(o, o + s) for o, s in ends)] = box
        return whole


def read_whole_state(name: str, saved: SavedState, open_file: OpenFile) -> Any:
    """Return a state's values with all tensors put together; needs no process group."""
    with ShardReader(name, saved, open_file) as reader:
        return map_paths(
            saved.values,
            lambda path, leaf: (
                reader.read_whole(path) if path in saved.tensors else leaf
            ),
        )
