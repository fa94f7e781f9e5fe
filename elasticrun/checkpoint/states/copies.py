"""Copies of states with many small tensors, made while training waits.

Torch takes twenty times as long to write 10,000 small tensors as to copy them. So they
are copied at the boundary, and written from there by another thread.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from elasticrun.checkpoint.states.nested import find_doubtful, is_plain, map_leaves
from elasticrun.checkpoint.states.numpy_scalars import encode_scalar

_SMALL = 1 << 16  # Bytes; a larger tensor takes longer to copy than to write down.
_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)


class Copies:
    """Copies one state; the memory is used again from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def copy(self, values: Any) -> Callable[[], Any] | None:
        """Copy nested values now; return what builds the copy, from any thread.

        It is good until the next copy is made. Returns None where the values are to be
        written at once: if their tensors are large on average, overlap, or are not on
        the CPU, or if some value may not load safely.
        """
        walk = _Walk()
        try:
            containers = walk.copy(values)
            is_fit = walk.has_small_tensors and not walk.has_overlaps
        except (_NotCopied, RecursionError, RuntimeError):  # As of sparse tensors.
            is_fit = False
        if not is_fit:
            self._buffers = {}
            return None
        self._buffers = {
            dtype: _concatenate(tensors, self._buffers.get(dtype))
            for dtype, tensors in walk.tensors.items()
        }
        return lambda: _put_together(containers, walk.shapes, self._buffers)


class _NotCopied(Exception):
    """A value is to be written at once."""


class _Walk:
    """Copies containers and plain values, and lists the tensors among them."""

    def __init__(self) -> None:
        self.tensors: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self.shapes: list[torch.Size] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []

    @property
    def has_small_tensors(self) -> bool:
        """Whether they are small on average."""
        return sum(self._sizes) <= _SMALL * (len(self._sizes) + 1)

    @property
    def has_overlaps(self) -> bool:
        """Whether some share memory, as tied weights do, and should go on to."""
        ranges = sorted(zip(self._starts, self._sizes, strict=True))
        return any(
            start + size > following
            for (start, size), (following, _) in pairwise(ranges)
        )

    def copy(self, values: Any) -> Any:
        kind = type(values)
        if kind is Tensor:
            self._take(values)
            return values  # For its place; `_put_together` has another one there.
        if kind is dict or kind is OrderedDict:
            return self._copy_dictionary(values)
        if kind is list or kind is tuple:
            return kind(values) if is_plain(values) else kind(map(self.copy, values))
        if kind is set and is_plain(values):
            return set(values)
        if is_plain((values,)):
            return values
        encoded = encode_scalar(values)
        if encoded is values:
            raise _NotCopied
        return encoded

    def _copy_dictionary(self, values: dict[Any, Any]) -> dict[Any, Any]:
        if not is_plain(values):  # Its keys.
            raise _NotCopied
        copied = type(values)(values)
        for key, value in values.items():
            if type(value) is Tensor:
                self._take(value)
            else:
                copied[key] = self.copy(value)
        if type(values) is OrderedDict:
            _check_attributes(values)
            vars(copied).update(vars(values))
        return copied

    def _take(self, tensor: Tensor) -> None:
        dtype, shape = tensor.dtype, tensor.shape
        if (
            not tensor.is_cpu
            or dtype not in _DTYPES
            or tensor.requires_grad
            or not tensor.is_contiguous()
            or tensor.__dict__
        ):
            raise _NotCopied
        self.shapes.append(shape)
        self._starts.append(tensor.data_ptr())
        self._sizes.append(tensor.nbytes)
        self.tensors[dtype].append(tensor if len(shape) == 1 else tensor.view(-1))


def _check_attributes(values: Any) -> None:
    """Refuse attributes of a dictionary that may not load: a module's has versions."""
    attributes = dict(vars(values))
    versions = attributes.pop("_metadata", {})
    rows = list(versions.values()) if type(versions) is OrderedDict else [versions]
    are_plain = set(map(type, rows)) <= {dict} and is_plain(
        [value for row in rows for value in row.values()]
    )
    if not are_plain or (attributes and any(True for _ in find_doubtful(attributes))):
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
