"""Joins a batch that several workers have read in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(pieces: Sequence[Any], places: Sequence[Sequence[int]]) -> Any:
    """Return what torch's default collate makes of all samples in their order.

    Args:
        pieces: What it has made of the samples of each worker that has any.
        places: Where these samples are in the batch.
    """
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    if isinstance(first, Tensor):
        order = torch.tensor([place for own in places for place in own])
        whole = torch.cat(list(pieces))
        return torch.empty_like(whole).index_copy_(0, order, whole)
    if isinstance(first, Mapping):
        merged = {key: joined([p[key] for p in pieces], places) for key in first}
        kind: Any = type(first)
        return merged if kind is dict else kind(merged)
    if not first:
        return first
    if isinstance(first[0], (str, bytes)):
        samples: list[Any] = [None] * sum(map(len, places))
        for piece, own in zip(pieces, places, strict=True):
            for place, sample in zip(own, piece, strict=True):
                samples[place] = sample
        return type(first)(samples)
    fields = [joined(own, places) for own in zip(*pieces, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
