"""Which replica writes which chunk of a sharded tensor, and how each fills its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from elasticrun.checkpoint.states.shards import (
    ALIGNMENT,
    Chunk,
    SavedTensor,
    ShardReader,
)
from elasticrun.errors import CheckpointError

# What one replica tells the others, as JSON has it.
Description = dict[str, Any]
# A tensor of the checkpoint that is in chunks, or one that was read with the values.
TensorSource = SavedTensor | Tensor


@dataclass(frozen=True)
class Layout:
    """Where every chunk of a state is written."""

    tensors: Mapping[str, SavedTensor]
    own: Sequence[Sequence[tuple[str, Chunk]]]


def describe(tensors: Mapping[str, Tensor], plain: Sequence[str]) -> Description:
    """Return what this replica has: its chunks, and the paths of all other values."""
    items = create_default_local_save_plan(dict(tensors), True).items
    return {
        "plain": sorted(plain),
        "tensors": {
            path: [str(each.dtype).removeprefix("torch."), list(each.shape)]
            for path, each in tensors.items()
        },
        "chunks": [
            [item.index.fqn, list(chunk.offsets), list(chunk.sizes)]
            for item in items
            if item.tensor_data is not None
            and 0 not in (chunk := item.tensor_data.chunk).sizes
        ],
    }


def make_layout(name: str, descriptions: Sequence[Description]) -> Layout:
    """Deal the chunks out, those that several replicas have to one of them.

    Every replica gets the same result from the same descriptions, by rank.
    """
    _check_same_on_all_ranks(name, descriptions)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        plans, _ = planner.create_global_plan([_plan(each) for each in descriptions])
    except (AssertionError, ValueError) as error:
        raise CheckpointError(
            f"the shards of {name!r} cannot be put together again: {error}"
        ) from error
    tensors = {
        path: SavedTensor(getattr(torch, dtype), tuple(size), [])
        for path, (dtype, size) in descriptions[0]["tensors"].items()
    }
    own: list[list[tuple[str, Chunk]]] = []
    for rank, plan in enumerate(plans):
        own.append([])
        start = 0
        for item in plan.items:
            path, data = item.index.fqn, item.tensor_data
            assert data is not None
            box = data.chunk
            chunk = Chunk(rank, start, tuple(box.offsets), tuple(box.sizes))
            tensors[path].chunks.append(chunk)
            own[rank].append((path, chunk))
            start += math.prod(chunk.sizes) * tensors[path].dtype.itemsize
            start += -start % ALIGNMENT
    return Layout(tensors, own)


def _plan(description: Description) -> SavePlan:
    items = []
    for path, offsets, sizes in description["chunks"]:
        dtype, size = description["tensors"][path]
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(getattr(torch, dtype)),
            torch.Size(size),
        )
        index = MetadataIndex(path, torch.Size(offsets))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _check_same_on_all_ranks(name: str, descriptions: Sequence[Description]) -> None:
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for kind in ("tensors", "plain"):
            if other[kind] == first[kind]:
                continue
            raise CheckpointError(
                f"{name!r} is not the same on all replicas: "
                f"{_difference(first[kind], other[kind], rank)}. Replicas that hold "
                "different modules, as the stages of a pipeline, are not supported: "
                "give all of them the same one, each with its shards."
            )


def _difference(first: Any, other: Any, rank: int) -> str:
    for path in sorted({*first, *other}):
        if path not in other:
            return f"rank 0 has {path!r}, rank {rank} has not"
        if path not in first:
            return f"rank {rank} has {path!r}, rank 0 has not"
        if isinstance(first, dict) and first[path] != other[path]:
            return f"{path!r} is {first[path]} on rank 0, {other[path]} on rank {rank}"
    return f"rank 0 and rank {rank} differ"


@torch.no_grad()
def fill(
    targets: Mapping[str, Tensor],
    sources: Mapping[str, TensorSource],
    reader: ShardReader,
) -> None:
    """Fill each target in place from the source of its path, which has its size.

    Of a sharded target only the own shard is filled: nothing is communicated. Nothing
    is changed before all files that are needed were found right.
    """
    planner = DefaultLoadPlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )
    described = {path: _describe(sources[path]) for path in targets}
    planner.set_up_planner(dict(targets), Metadata(described), is_coordinator=True)
    [plan] = planner.create_global_plan([planner.create_local_plan()])
    items = planner.finish_plan(plan).items
    reader.open(
        {
            source.chunks[_number(item)].rank
            for item in items
            if isinstance(source := sources[item.storage_index.fqn], SavedTensor)
        }
    )
    for item in items:
        target = planner.resolve_tensor(item)
        target.copy_(_read(item, sources[item.storage_index.fqn], reader))
        planner.commit_tensor(item, target)


def _number(item: ReadItem) -> int:
    assert item.storage_index.index is not None
    return item.storage_index.index


def _read(item: ReadItem, source: TensorSource, reader: ShardReader) -> Tensor:
    if isinstance(source, SavedTensor):
        path = item.storage_index.fqn
        return reader.read(path, _number(item), item.storage_offsets, item.lengths)
    box = source
    for dimension, length in enumerate(item.lengths):
        box = box.narrow(dimension, item.storage_offsets[dimension], length)
    return box


def _describe(source: TensorSource) -> STORAGE_TYPES:
    shape = tuple(source.shape)
    boxes = (
        [(chunk.offsets, chunk.sizes) for chunk in source.chunks]
        if isinstance(source, SavedTensor)
        else [((0,) * len(shape), shape)]
    )
    return TensorStorageMetadata(
        TensorProperties(source.dtype),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes],
    )
