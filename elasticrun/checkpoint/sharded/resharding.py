"""Loads this replica's shards from a checkpoint, however that was sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from elasticrun.checkpoint.states.shards import SavedTensor, ShardReader

# A tensor of the checkpoint that is in chunks, or one that was read with the values.
TensorSource = SavedTensor | Tensor


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
