"""NumPy scalars to bytes and back, with their types.

An unpickler that executes nothing does not know these types. And a float32 sum that
came back as a Python number would continue in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MARK = b"elasticrun.numpy:"


def encode_scalar(leaf: Any) -> Any:
    """Return a scalar as bytes that tell its type; any other leaf as it is.

    A record of several fields is left as it is, and so refused when it is saved.
    """
    if isinstance(leaf, np.generic) and not isinstance(leaf, np.void):
        return _MARK + leaf.dtype.str.encode() + b":" + leaf.tobytes()
    return leaf


def decode_scalar(leaf: Any) -> Any:
    """Return what `encode_scalar` was given."""
    if type(leaf) is not bytes or not leaf.startswith(_MARK):
        return leaf
    kind, _, data = leaf.removeprefix(_MARK).partition(b":")
    dtype = np.dtype(kind.decode())
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()


def plain_number(leaf: Any) -> Any:
    """Return a scalar as a number or a text of Python's; any other leaf as it is."""
    return leaf.item() if isinstance(leaf, np.generic) else leaf
