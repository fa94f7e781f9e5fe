"""Copies states of many small tensors, so that training need not wait longer.

To write 10,000 small tensors takes torch twenty times as long as to copy them. So they
are copied at the boundary, and another thread writes the copies.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import islice
from operator import gt
from typing import Any

import torch
from torch import Tensor

from elasticrun.checkpoint.states.nested import (
    encode_scalar,
    find_maybe_unsafe,
    is_plain,
    map_leaves,
)

_SMALL = 1 << 16  # Bytes; a larger tensor takes longer to copy than to write down.
_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
_TENSORS = frozenset((Tensor,))


class StateCopier:
    """Copies one state; its memory is reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def copy(self, values: Any) -> Callable[[], Any] | None:
        """Copy nested values now; return what builds the copy, from any thread.

        It is good until the next copy is made. Returns None where the values are to be
        written at once: if their tensors are large on average, overlap, or are not on
        the CPU, or if some value may not load safely.
        """
        found: list[Tensor] = []
        try:
            containers = _copy_containers(values, found)
            tensors, shapes = _flatten(found)
        except (_NotCopied, RecursionError, RuntimeError):  # As of sparse tensors.
            self._buffers = {}
            return None
        self._buffers = buffers = {
            dtype: _concatenate(row, self._buffers.get(dtype))
            for dtype, row in tensors.items()
        }
        return partial(_put_together, containers, shapes, buffers)


class _NotCopied(Exception):
    """A value is to be written at once."""


def _copy_containers(values: Any, found: list[Tensor]) -> Any:
    """Copy containers and plain values; list the tensors, which stay where they are."""
    kind = type(values)
    if kind is Tensor:
        found.append(values)
        return values
    if kind is dict or kind is OrderedDict:
        return _copy_dictionary(values, found)
    if kind is list or kind is tuple:
        if is_plain(values):
            return kind(values)
        return kind(_copy_containers(value, found) for value in values)
    if kind is set and is_plain(values):
        return set(values)
    if is_plain((values,)):
        return values
    encoded = encode_scalar(values)
    if encoded is values:
        raise _NotCopied
    return encoded


def _copy_dictionary(values: dict[Any, Any], found: list[Tensor]) -> dict[Any, Any]:
    if not is_plain(values):  # Its keys.
        raise _NotCopied
    copied = values.copy()
    if _TENSORS.issuperset(map(type, values.values())):
        found.extend(values.values())
    else:
        for key, value in values.items():
            copied[key] = _copy_containers(value, found)
    if type(values) is OrderedDict and (attributes := vars(values)):
        _check_attributes(attributes)
        vars(copied).update(attributes)
    return copied


def _flatten(
    found: list[Tensor],
) -> tuple[dict[torch.dtype, list[Tensor]], list[torch.Size]]:
    """Return tensors in one dimension by their types, and the shapes of all.

    Refused are tensors that are large on average, that share memory, as tied weights
    do, and should go on to, that are not on the CPU, or of a kind of their own.
    """
    tensors: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    shapes, starts, ends = [], [], []
    for tensor in found:
        dtype, shape = tensor.dtype, tensor.shape
        if (
            not tensor.is_cpu
            or dtype not in _DTYPES
            or tensor.requires_grad
            or not tensor.is_contiguous()
            or tensor.__dict__
        ):
            raise _NotCopied
        shapes.append(shape)
        starts.append(start := tensor.data_ptr())
        ends.append(start + tensor.nbytes)
        tensors[dtype].append(tensor if len(shape) == 1 else tensor.view(-1))
    are_small = sum(ends) - sum(starts) <= _SMALL * (len(found) + 1)
    starts.sort()
    ends.sort()
    if not are_small or any(map(gt, ends, islice(starts, 1, None))):
        raise _NotCopied
    return tensors, shapes


def _check_attributes(attributes: dict[str, Any]) -> None:
    """Refuse attributes of a dictionary that may not load: a module's has versions."""
    versions = attributes.get("_metadata")
    if type(versions) is not OrderedDict or len(attributes) > 1:
        if any(True for _ in find_maybe_unsafe(attributes)):
            raise _NotCopied
    elif not all(
        type(row) is dict and is_plain(row.values()) for row in versions.values()
    ):
        raise _NotCopied


def _concatenate(tensors: list[Tensor], used: Tensor | None) -> Tensor:
    num_values = sum(map(Tensor.numel, tensors))
    if used is None or used.numel() != num_values:
        used = torch.empty(num_values, dtype=tensors[0].dtype)
    return torch.cat(tensors, out=used)


def _put_together(
    containers: Any, shapes: list[torch.Size], buffers: dict[torch.dtype, Tensor]
) -> Any:
    """Return the containers with each tensor's copy in its place, in its own memory."""
    places = dict.fromkeys(buffers, 0)
    rest = iter(shapes)

    def copy_of(leaf: Any) -> Any:
        if type(leaf) is not Tensor:
            return leaf
        shape, start = next(rest), places[leaf.dtype]
        places[leaf.dtype] += shape.numel()
        part = buffers[leaf.dtype][start : places[leaf.dtype]]
        return part.clone().view(shape)

    return map_leaves(containers, copy_of)
