"""What a checkpoint holds, read, shown and exported; nothing of it is executed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.inspection.listing import (
    InspectionError,
    columns,
    manifest_values,
    position_text,
    size_text,
    time_text,
)
from elasticrun.checkpoint.states.expected import SIZES, check_values
from elasticrun.checkpoint.states.nested import map_leaves, plain_number
from elasticrun.checkpoint.states.parameter_names import by_numbers
from elasticrun.checkpoint.states.per_rank import parts_of
from elasticrun.checkpoint.states.shards import SavedState, read_whole_state
from elasticrun.checkpoint.states.state import has_many_ranks, state_of_file
from elasticrun.checkpoint.states.values import UnsafeValuesError, load_values
from elasticrun.errors import CheckpointError, text_of

_LARGEST_TEXT = 1 << 20
_LARGEST_SHOWN = 8
_WIDTH = 100
_PREFIXES = ("loader.", "loader-")  # As states of loaders are called.
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Opaque:
    """A file in a format of the user's own, or one that could execute code.

    Attributes:
        data: Its first bytes; none if they are not for reading.
    """

    data: bytes
    kind: str


def show(checkpoint: Checkpoint, state: str | None, *, as_json: bool) -> Iterator[str]:
    """Yield the lines that show a checkpoint, or one of its states in full."""
    names = names_of_state(checkpoint, state)
    contents = ((name, list(leaves(load_file(checkpoint, name)))) for name in names)
    if as_json:
        yield json.dumps(
            {
                **manifest_values(checkpoint),
                "batch_sizes": plans_in(checkpoint),
                "states": {
                    name: [leaf_values(*each) for each in found]
                    for name, found in contents
                },
            }
        )
        return
    if state is None:
        yield from _describe(checkpoint)
    for name, found in contents:
        files = checkpoint.manifest.files  # Also those with its shards.
        size = sum(f.size for f in files if name in (f.name, state_of_file(f.name)))
        yield f"{name}  {size_text(size)}"
        rows = [(f"  {path}", kind_of(leaf), value_of(leaf)) for path, leaf in found]
        yield from columns(rows) if rows else ()


def _describe(checkpoint: Checkpoint) -> Iterator[str]:
    manifest = checkpoint.manifest
    yield str(checkpoint.path)
    yield from columns(
        [
            ("  job", manifest.job),
            ("  time", time_text(manifest.time)),
            ("  generation", str(manifest.generation)),
            ("  replicas", str(manifest.world_size)),
            ("  position", position_text(manifest.position)),
            ("  torch", manifest.torch_version),
            ("  elasticrun", manifest.elasticrun_version),
            *(
                ("  batch sizes", f"{plan} of {name}, by samples seen")
                for name, plan in plans_in(checkpoint).items()
            ),
        ]
    )


def names_of_state(checkpoint: Checkpoint, word: str | None) -> list[str]:
    """Return the files of a state: one, or one a rank; all files without a word.

    Files with shards of tensors do not count: they are read with their state's file.
    """
    every = [each for each in checkpoint.names() if not _holds_shards(checkpoint, each)]
    if word is None:
        return every
    chosen = [name for name in every if word in (name, state_of_file(name))]
    if not chosen:
        states = sorted({state_of_file(name) for name in every})
        raise InspectionError(
            f"there is no state {word!r} in {checkpoint.path}, only: "
            f"{', '.join(states)}"
        )
    return chosen


def _holds_shards(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a rank's file is beside one of all ranks of the same state."""
    state = state_of_file(name)
    return state != name and checkpoint.has(state)


def load_file(checkpoint: Checkpoint, name: str) -> Any:
    """Return what a file holds, after its checksum was found right.

    Tensors that ranks share out are put together, from the checked files of all.
    """
    record = checkpoint.manifest.record(name)
    try:
        with checkpoint.open(name) as file:
            is_torchs = zipfile.is_zipfile(file) and _is_of_torch_save(file)
            file.seek(0)
            values = load_values(file) if is_torchs else _parse(file, record)
        return _put_together(checkpoint, name, values)
    except UnsafeValuesError:
        kind = f"{record.size} bytes; only a full unpickler could read them"
        return Opaque(b"", kind)
    except (CheckpointError, OSError) as error:
        raise InspectionError(text_of(error)) from error
    except Exception as error:  # Whatever torch makes of a file that is not its own.
        path = checkpoint.path / name
        raise InspectionError(f"{path} cannot be read: {text_of(error)}") from error


def _is_of_torch_save(file: BinaryIO) -> bool:
    """Return whether a zip file is of `torch.save`; NumPy and others write them too.

    That of a program (`torch.jit.save`) is none: it would have to be executed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
            return "data.pkl" in names and "constants.pkl" not in names
    except zipfile.BadZipFile:  # It only ends like one.
        return False


def _put_together(checkpoint: Checkpoint, name: str, values: Any) -> Any:
    if has_many_ranks(name):
        parts = parts_of(values).items()
        return {rank: load_values(io.BytesIO(part)) for rank, part in parts}
    saved = SavedState.decode(values)
    if saved is not None:
        values = read_whole_state(name, saved, checkpoint.open)
    return by_numbers(values)


def _parse(file: BinaryIO, record: FileRecord) -> Any:
    data = file.read(_LARGEST_TEXT)
    if record.size <= _LARGEST_TEXT:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            pass
    return Opaque(data, f"{record.size} bytes")


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything that is not a container with its path, like `state.0.step`.

    A long row of plain values, like a random generator's words, is one.
    """
    if isinstance(values, Mapping):
        items = [
            (f"{path}.{key}" if path else str(key), v) for key, v in values.items()
        ]
    elif isinstance(values, (list, tuple)) and not _is_long_row(values):
        items = [(f"{path}[{number}]", v) for number, v in enumerate(values)]
    else:
        yield path, values
        return
    if not items and path:
        yield path, values
    for inner, value in items:
        yield from leaves(value, inner)


def _is_long_row(values: Sequence[Any]) -> bool:
    return len(values) > _LARGEST_SHOWN and all(
        isinstance(value, (int, float, str, bytes)) for value in values
    )


def kind_of(leaf: Any) -> str:
    """Return what it is: a tensor's dtype and shape, or the type."""
    if isinstance(leaf, torch.Tensor):
        return f"{_dtype(leaf)} {_shape(leaf)}"
    if isinstance(leaf, Opaque):
        return leaf.kind
    if isinstance(leaf, (list, tuple)) and leaf:
        return f"{type(leaf).__name__} of {len(leaf)}"
    return type(leaf).__name__


def value_of(leaf: Any) -> str:
    """Return its value if that is small, else nothing."""
    if isinstance(leaf, torch.Tensor):
        shown = _small_values(leaf)
        return "" if shown is None or leaf.numel() == 0 else _round(shown)
    if isinstance(leaf, Opaque):
        return _shorten(repr(leaf.data[:_WIDTH])) if leaf.data else ""
    return _shorten(repr(plain_number(leaf)))


def leaf_values(path: str, leaf: Any) -> dict[str, Any]:
    """Return a leaf as plain values."""
    if isinstance(leaf, torch.Tensor):
        tensor = {"dtype": _dtype(leaf), "shape": _shape(leaf)}
        return {"path": path, **tensor, "value": _plain(_small_values(leaf))}
    return {"path": path, "type": kind_of(leaf), "value": _plain(leaf)}


def _shape(tensor: torch.Tensor) -> list[int]:
    return [tensor.size(0)] if tensor.is_nested else list(tensor.shape)


def _small_values(tensor: torch.Tensor) -> Any:
    """Return a small tensor's values; None if it is large, or they cannot be had."""
    try:
        is_small = tensor.numel() <= _LARGEST_SHOWN
        return tensor.to_dense().tolist() if is_small else None
    except RuntimeError:
        return None


def _round(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_round, values))}]"
    return f"{values:.6g}" if isinstance(values, float) else str(values)


def _plain(value: Any) -> Any:
    value = plain_number(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return _shorten(repr(value.data if isinstance(value, Opaque) else value))
    return value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def plans_in(checkpoint: Checkpoint) -> dict[str, dict[int, int]]:
    """Return each loader's plan, as `batch_size=` takes it.

    A plan goes from the samples seen to the size of global batches from there on.
    """
    plans = {name: plan_in(values) for name, values in states_of_loaders(checkpoint)}
    return {name: plan for name, plan in plans.items() if plan}


def states_of_loaders(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each loader, and what is kept of it."""
    for name in checkpoint.names():
        if name.startswith(_PREFIXES):
            values = load_file(checkpoint, name)
            if isinstance(values, dict):  # Whoever has written the file.
                yield name.removeprefix("loader."), values


def plan_in(values: dict[str, Any]) -> dict[int, int]:
    """Return the plan in the state of a loader; empty of one of loaders."""
    sizes = values.get("batch_size", [])
    given = [[0, sizes]] if isinstance(sizes, int) else sizes
    sizes = [*given, *values.get("decided_batch_sizes", [])]
    check_values(sizes, SIZES, name="sizes of batches")
    return dict(sizes)


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
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise InspectionError(
            "safetensors is not installed; pip install elasticrun[safetensors], or use "
            "a .pt file."
        ) from error
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
    data: bytes = save(copies)
    return data
