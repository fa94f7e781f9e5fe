"""Batches on a device, each copied while the program computes with the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device; on a GPU copied one ahead."""
    if device.type == "cuda":
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
    copy may take over that one's memory, and runs while this one is computed with.
    """
    stream = torch.cuda.Stream(device)

    def copied() -> tuple[Any, ...]:
        """Return the next batch and its original, or nothing at the end."""
        for batch in batches:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                return moved(batch, device), batch
        return ()

    ahead = copied()
    while ahead:
        torch.cuda.current_stream(device).wait_stream(stream)
        # The original goes on to live: its pinned memory may still be read.
        current, ahead = ahead, copied()
        yield current[0]
