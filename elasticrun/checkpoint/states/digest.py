"""A short identity of nested values, to tell whether replicas have the same."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from elasticrun.checkpoint.states.paths import map_paths

_MOST_VALUES = 1 << 12  # Of a tensor; what counts something is small.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def digest_of(values: Any) -> str:
    """Return a digest of nested values; of large tensors, of some values in them.

    Of objects that are no plain values only the type counts: what they print may be
    their place in memory. What holds itself is refused when it is saved.
    """
    digest = hashlib.sha256()
    with suppress(RecursionError):
        map_paths(
            values,
            lambda path, leaf: digest.update(f"{path}={_text(leaf)};".encode()),
        )
    return digest.hexdigest()


def _text(leaf: Any) -> str:
    if isinstance(leaf, Tensor) and not leaf.is_meta and not leaf.is_sparse:
        flat = leaf.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _MOST_VALUES)]
        return f"{leaf.dtype}{list(leaf.shape)}{some.tolist()}"
    if isinstance(leaf, (set, frozenset)):
        return str(sorted(map(_text, leaf)))
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
