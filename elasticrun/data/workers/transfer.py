"""Sends small tensors from a DataLoader worker inside its messages, by value.

Torch moves every tensor into shared memory and sends a file descriptor. For a few
kilobytes, these system calls take several times as long as sending the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

# Bytes: up to here two to five times as many batches a second arrive; from a mebibyte
# on, shared memory is the faster way.
LARGEST = 1 << 17

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def send_small_tensors_by_value() -> None:
    """Let this process, a DataLoader worker, send them so from now on."""
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Reduced:
    # Neither way keeps these two flags, so that torch would deliver other values.
    tensor = tensor.resolve_conj().resolve_neg()
    if not _is_plain(tensor) or not 0 < tensor.nbytes <= LARGEST:
        reduced: Reduced = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return reduced
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its bytes, type and shape are all that there is to it."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and tensor.is_contiguous()
    )


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # A copy in memory of torch's own, aligned and resizable as any other tensor's.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
