"""Copies each batch to a device while the program computes with the one before."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def is_read_ahead(device: torch.device | None) -> bool:
    """Return whether a loader for a device reads a batch before the program asks."""
    return device is not None and device.type == "cuda"


def on_device(
    batches: Iterator[Any], device: torch.device, *, is_ahead: bool
) -> Iterator[Any]:
    """Yield the batches on a device, perhaps copied one ahead."""
    if is_ahead:
        return _copied_ahead(batches, device)
    return (moved(batch, device) for batch in batches)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device, with what it holds.

    Tensors, objects with a `to` of their own, and dictionaries, lists and tuples of
    these; anything else stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        values = {key: moved(value, device) for key, value in batch.items()}
        return values if type(batch) is dict else _like(batch, values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # A named one.
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return _like(batch, [moved(value, device) for value in batch])
    return batch


def _like(batch: Any, values: Any) -> Any:
    kind: Any = type(batch)
    return kind(values)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield a batch once the copy of the next one has been asked for.

    The copies have a stream of their own. Each waits for what the program has asked of
    its stream until then, which used the batch before the one that is handed out: the
    copy may take over that one's memory, and runs while this one is computed with. A
    program that computes with a batch on yet another stream tells torch so, as of any
    tensor (`record_stream`).
    """
    streams: Any = torch.get_device_module(device)
    # Of "cuda", which one that is.
    stream = _stream_of_copies(torch.empty(0, device=device).device)

    def copied() -> tuple[Any, ...]:
        """Return the next batch and its original, or nothing at the end."""
        for batch in batches:
            stream.wait_stream(streams.current_stream(device))
            with streams.stream(stream):
                return moved(batch, device), batch
        return ()

    ahead = copied()
    while ahead:
        streams.current_stream(device).wait_stream(stream)
        # The original goes on to live: its pinned memory may still be read.
        current, ahead = ahead, copied()
        yield current[0]


@functools.cache
def _stream_of_copies(device: torch.device) -> Any:
    """Return the stream of a device's copies, one for all loops of this process.

    The memory of a stream's tensors is kept for that stream: a new one for each loop
    would hold on to the batches of as many loops as torch has streams.
    """
    module: Any = torch.get_device_module(device)
    return module.Stream(device)
