"""Tensors cut by any mesh load on any other: the same numbers, each written once."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticrun.checkpoint.states.dtensors import ShardedModuleState
from elasticrun.checkpoint.states.layout import Layout, describe, fill, make_layout
from elasticrun.checkpoint.states.shards import SavedState, ShardReader

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool]


class Mesh(NamedTuple):
    """Replicas in rows and columns, and how each tensor is cut by them."""

    shape: tuple[int, ...]
    placements: list[list[Placement]]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    sizes = st.lists(st.integers(0, 7), min_size=1, max_size=3)
    made = []
    for size in draw(st.lists(sizes, min_size=1, max_size=4)):
        dtype = draw(st.sampled_from(DTYPES))
        numbers = torch.arange(1, 1 + math.prod(size)) * 37 % 101
        made.append(numbers.to(dtype).view(size))
    return made


@st.composite
def meshes(draw: st.DrawFn, whole: list[Tensor]) -> Mesh:
    shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 1), (2, 2), (2, 3)]))
    placements = [
        [
            draw(st.sampled_from([Replicate(), *map(Shard, range(tensor.dim()))]))
            for _ in shape
        ]
        for tensor in whole
    ]
    return Mesh(shape, placements)


@st.composite
def movements(draw: st.DrawFn) -> tuple[list[Tensor], Mesh, Mesh]:
    whole = draw(tensors())
    return whole, draw(meshes(whole)), draw(meshes(whole))


@contextmanager
def being(rank: int, mesh: Mesh, whole: list[Tensor]) -> Iterator[dict[str, DTensor]]:
    """Be one rank of a mesh, and have its shards of all tensors."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=mesh.num_ranks
    )
    try:
        devices = init_device_mesh("cpu", mesh.shape)
        yield {
            f"t{number}": DTensor.from_local(
                own_part(tensor, rank, mesh.shape, placements).clone(),
                devices,
                placements,
                shape=tensor.shape,
                stride=tensor.contiguous().stride(),
            )
            for number, (tensor, placements) in enumerate(
                zip(whole, mesh.placements, strict=True)
            )
        }
    finally:
        dist.destroy_process_group()


def own_part(
    tensor: Tensor, rank: int, shape: tuple[int, ...], placements: list[Placement]
) -> Tensor:
    """Cut as torch does: rows first, then columns."""
    coordinates = [rank // math.prod(shape[d + 1 :]) % n for d, n in enumerate(shape)]
    for size, coordinate, placement in zip(shape, coordinates, placements, strict=True):
        if isinstance(placement, Shard):
            step = -(-tensor.shape[placement.dim] // size)
            start = min(step * coordinate, tensor.shape[placement.dim])
            end = min(start + step, tensor.shape[placement.dim])
            tensor = tensor.narrow(placement.dim, start, end - start)
    return tensor


def save(mesh: Mesh, whole: list[Tensor]) -> tuple[Layout, dict[str, bytes]]:
    descriptions: list[Any] = []
    for rank in range(mesh.num_ranks):
        with being(rank, mesh, whole) as own:
            descriptions.append(describe(own, []))
    layout = make_layout("model", descriptions)
    files = {}
    for rank in range(mesh.num_ranks):
        with being(rank, mesh, whole) as own:
            state = ShardedModuleState("model", torch.nn.Module())
            [chunks] = state.parts()
            chunks.tensors = own  # type: ignore[attr-defined]
            chunks.own = layout.own[rank]  # type: ignore[attr-defined]
            buffer = io.BytesIO()
            chunks.save(buffer)
            files[f"model.rank-{rank}"] = buffer.getvalue()
    return layout, files


def load(
    mesh: Mesh, like: list[Tensor], saved: SavedState, files: Mapping[str, bytes]
) -> None:
    for rank in range(mesh.num_ranks):
        with being(rank, mesh, [torch.zeros_like(each) for each in like]) as own:
            with ShardReader("model", saved, lambda name: io.BytesIO(files[name])) as r:
                fill(own, saved.tensors, r)
            for number, tensor in enumerate(like):
                expected = own_part(tensor, rank, mesh.shape, mesh.placements[number])
                assert torch.equal(own[f"t{number}"].to_local(), expected)


@pytest.mark.slow
@given(movements())
def test_any_mesh_loads_what_another_has_saved(
    movement: tuple[list[Tensor], Mesh, Mesh],
) -> None:
    whole, before, after = movement
    layout, files = save(before, whole)
    saved = SavedState.decode(SavedState({}, layout.tensors).encode())
    assert saved is not None
    load(after, whole, saved, files)
    with ShardReader("model", saved, lambda name: io.BytesIO(files[name])) as reader:
        for number, tensor in enumerate(whole):
            assert torch.equal(reader.read_whole(f"t{number}"), tensor)


@pytest.mark.slow
@given(movements())
def test_every_number_is_written_once(
    movement: tuple[list[Tensor], Mesh, Mesh],
) -> None:
    whole, before, _ = movement
    layout, files = save(before, whole)
    written = sum(
        math.prod(chunk.sizes) * layout.tensors[path].dtype.itemsize
        for own in layout.own
        for path, chunk in own
    )
    assert written == sum(tensor.nbytes for tensor in whole)
    assert sum(map(len, files.values())) < written + 64 * sum(map(len, layout.own)) + 1
