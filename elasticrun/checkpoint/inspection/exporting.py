"""`elasticrun checkpoints export`: writes a state as a file of its own.

The file's ending decides the format: safetensors, or else that of `torch.save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.inspection.contents import Opaque, load_file, names_of_state
from elasticrun.checkpoint.inspection.entries import InspectionError
from elasticrun.checkpoint.states.nested import map_leaves
from elasticrun.checkpoint.states.numpy_scalars import plain_number

_SAFETENSORS = ".safetensors"


def export_state(checkpoint: Checkpoint, target: Path, *, state: str) -> str:
    """Write one state into a file of its own, durably; return what was done."""
    (name, *others) = names_of_state(checkpoint, state)
    if others:
        raise InspectionError(
            f"each rank has a {state!r} of its own; name one of {name}, "
            f"{', '.join(others)}"
        )
    values = load_file(checkpoint, name)
    if isinstance(values, Opaque):
        raise InspectionError(
            f"{checkpoint.path / name} holds no tensors, but {values.kind}. Copy the "
            "file as it is."
        )
    values = map_leaves(values, plain_number)
    if target.suffix == _SAFETENSORS:
        data = _encode_safetensors(values, name)
        replace_file(target, lambda file: file.write(data))
    else:
        replace_file(target, lambda file: torch.save(values, file))
    return f"{checkpoint.path / name} is now {target}"


def _encode_safetensors(values: Any, name: str) -> bytes:
    library = _import_safetensors()
    is_flat = isinstance(values, Mapping) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor)
        for key, value in values.items()
    )
    if not is_flat:
        raise InspectionError(
            f"{name!r} holds more than tensors by name, which is all that a "
            "safetensors file can hold. Export it to a .pt file."
        )
    # Tensors that share memory, as tied weights do, are refused there.
    # They lie in the usual order there, whatever that of channels_last models is.
    copies = {
        key: each.clone(memory_format=torch.contiguous_format)
        for key, each in values.items()
    }
    data: bytes = library.save(copies)
    return data


def _import_safetensors() -> Any:
    try:
        from safetensors import torch as library
    except ImportError as error:
        raise InspectionError(
            "safetensors is not installed; pip install elasticrun[safetensors], or use "
            "a .pt file."
        ) from error
    return library
