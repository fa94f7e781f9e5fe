"""States as fields: what can be compared, written down and told people."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from elasticrun.checkpoint.states.generators import Generators, capture
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import StatefulState, local_shard
from elasticrun.checkpoint.states.values import load_values
from elasticrun.job.exact import ExactSum

Field = Any  # A JSON value; an object with "hash" stands for what is too big.

_MOST_ITEMS = 16  # Of a list that is written as it is.
_MOST_ELEMENTS = 1000  # Of a list that is looked into.
_MOST_TEXT = 200
_MOST_SHOWN = 16  # Values of a tensor.
_MOST_KNOWN = 10_000
_KNOWN: dict[tuple[str, str], dict[str, Any]] = {}  # By kind and hash.


def fields_of_state(state: BaseState) -> dict[str, Field]:
    """Return every field of a state under the state's name."""
    if isinstance(state, Generators):
        return {}
    return dict(flatten(state.name, _values(state)))


def _values(state: BaseState) -> Any:
    if isinstance(state, StatefulState):
        return state.target.state_dict()
    buffer = io.BytesIO()
    state.save(buffer)
    data = buffer.getvalue()
    try:
        return _with_sums(load_values(io.BytesIO(data)), state)
    except Exception:  # Not ours: any bytes that a State of the user's writes.
        pass
    try:
        return json.loads(data)
    except ValueError:
        return data


def _with_sums(values: Any, state: BaseState) -> Any:
    """Return an accumulator's sums as numbers; it writes all their digits, as text."""
    totals = getattr(state, "totals", None)
    if not isinstance(totals, dict) or not isinstance(values, dict):
        return values
    sums = {key: v.value for key, v in totals.items() if isinstance(v, ExactSum)}
    return {**values, "totals": sums} if sums else values


def fields_of_generators(device: torch.device) -> dict[str, Field]:
    """Return what the process's random generators are at, as one field each."""
    values = capture(device)
    return {
        f"random.{name}": {"hash": _hash(repr(_plain(value)).encode())}
        for name, value in values.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def flatten(name: str, value: Any) -> Iterator[tuple[str, Field]]:
    """Yield nested values as fields: `optimizer.param_groups[0].lr`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple) and not are_plain(value, _MOST_ITEMS):
        yield f"len({name})", len(value)
        for number, inner in enumerate(value[:_MOST_ELEMENTS]):
            yield from flatten(f"{name}[{number}]", inner)
    else:
        yield name, field_of(value)


def are_plain(values: Collection[Any], most: int) -> bool:
    """Return whether values are numbers, text and the like, and not too many."""
    return len(values) <= most and all(
        isinstance(each, bool | int | float | str | None) for each in values
    )


def field_of(value: Any) -> Field:
    """Return one value as a field."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else _hashed(value.encode(), "text")
    if isinstance(value, bytes):
        return _hashed(value, f"{len(value)} bytes")
    if isinstance(value, torch.Tensor):
        return field_of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _hashed(value.tobytes(), f"array of {value.shape}")
    if isinstance(value, list | tuple):
        return [field_of(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))[:_MOST_ELEMENTS]
    return {"object": type(value).__qualname__}


def _hashed(data: bytes, text: str) -> Field:
    return {"hash": _hash(data), "text": text}


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def field_of_tensor(tensor: torch.Tensor) -> Field:
    """Return a tensor's hash, its norm, and some of its values.

    What moves a tensor further than rounding moves its norm or one of these, so that
    whole tensors need not be kept.
    """
    own = local_shard(tensor).detach().cpu().contiguous()
    if own.numel() == 1 and not own.is_floating_point() and not own.is_complex():
        return own.item()
    kind = f"{str(own.dtype).removeprefix('torch.')}{list(own.shape)}"
    data = own.reshape(-1).view(torch.uint8).numpy() if own.numel() else b""
    field: dict[str, Any] = {"tensor": kind, "hash": _hash(data)}
    known = _KNOWN.get((kind, field["hash"]))
    if known is not None:  # Most tensors are as they were a moment ago.
        return known
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[kind, field["hash"]] = field
    if own.is_floating_point() and own.numel():
        values = own.reshape(-1).double()
        field["norm"] = _finite(float(values.norm()))
        some = values[:: max(1, len(values) // _MOST_SHOWN)][:_MOST_SHOWN]
        field["some"] = [_finite(each) for each in some.tolist()]
    return field


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e300
