"""`elasticrun checkpoints export` and `import`: a state out of one, and into one.

Files are those of `torch.save`, or of safetensors by their ending.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.inspection.contents import Opaque, load_file, names_of_state
from elasticrun.checkpoint.inspection.entries import InspectionError, find_entries
from elasticrun.checkpoint.inspection.fitting import (
    check_fits,
    check_is_asked_for,
    check_name,
)
from elasticrun.checkpoint.manifest import Manifest, version
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.states.nested import map_leaves
from elasticrun.checkpoint.states.numpy_scalars import plain_number
from elasticrun.checkpoint.states.state import state_of_file
from elasticrun.checkpoint.states.values import (
    check_loads_safely,
    load_values,
    save_values,
)
from elasticrun.checkpoint.storage.storage import Storage
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import text_of

_PREFIX = "module."
_SAFETENSORS = ".safetensors"


def export_state(
    checkpoint: Checkpoint, target: Path, *, state: str, has_prefix: bool | None
) -> str:
    """Write one state into a file of its own, durably; return what was done.

    Args:
        has_prefix: Whether the keys are to begin with `module.`; None leaves them.

    Raises:
        InspectionError: There is no such state, or it cannot be written like that.
        OSError: The file cannot be written.
    """
    (name, *others) = names_of_state(checkpoint, word=state)
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
    values = map_leaves(set_prefix(values, has_prefix), plain_number)
    if target.suffix == _SAFETENSORS:
        data = _encode_safetensors(values, name)
        replace_file(target, lambda file: file.write(data))
    else:
        replace_file(target, lambda file: torch.save(values, file))
    return f"{checkpoint.path / name} is now {target}"


def set_prefix(values: Any, has_prefix: bool | None) -> Any:
    """Return a state dictionary whose keys begin with `module.`, or do not.

    Raises:
        InspectionError: It has no keys that could.
    """
    if has_prefix is None:
        return values
    if not isinstance(values, Mapping) or not all(isinstance(k, str) for k in values):
        raise InspectionError(
            f"a prefix needs a dictionary with names as keys, not {type(values)}"
        )
    plain = {key.removeprefix(_PREFIX): value for key, value in values.items()}
    if len(plain) < len(values):
        raise InspectionError(
            f"without {_PREFIX!r}, two names would be the same; export it as it is"
        )
    return {f"{_PREFIX * has_prefix}{key}": value for key, value in plain.items()}


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


def import_state(
    source: Path,
    storage: Storage,
    *,
    state: str,
    job: str | None,
    is_new: bool = False,
    is_forced: bool = False,
) -> Checkpoint:
    """Commit a checkpoint with one state from a file, and all others as they were.

    In an empty directory it is the job's first: the program starts at its beginning,
    with that state loaded. Keys that all begin with `module.` lose it, unless those of
    the newest checkpoint's state do as well; if they do, keys without it get it.

    Args:
        job: The job's name; needed if there is no checkpoint yet.
        is_new: Whether the newest checkpoint may lack the state.
        is_forced: Whether the state may have other keys and shapes than there.

    Raises:
        InspectionError: The file cannot be used, or the job is not known.
        StateNameError: The name is none for a state.
        CheckpointError: A live job uses the directory, or the newest is damaged.
        OSError: It could not be written.
    """
    check_name(state)
    values = _read(source)
    check_loads_safely(values, name=state)
    store = CheckpointStore(storage.place, job=job or _job_of(storage))
    store.acquire(timeout=0)
    try:
        newest = store.find_newest()
        if newest is not None:
            check_is_asked_for(newest, state, is_new=is_new)
        values = _with_prefix_of(_keys_of(newest, state), values)
        if newest is not None and newest.has(state) and not is_forced:
            check_fits(newest, state, values, source=source)
        return _commit(store, newest, state, values)
    finally:
        store.release()


def _commit(
    store: CheckpointStore, newest: Checkpoint | None, state: str, values: Any
) -> Checkpoint:
    """Write the state, and what else the newest checkpoint has, into the next one."""
    old = newest.manifest if newest is not None else None
    generation = store.next_generation()
    draft = store.begin(store.next_number())
    try:
        files = [draft.write(state, lambda file: save_values(values, file))]
        if newest is not None:
            others = [n for n in newest.names() if state_of_file(n) != state]
            files += [draft.copy(newest, name) for name in others]
        return draft.commit(
            Manifest(
                job=store.job,
                number=draft.number,
                generation=generation,
                world_size=old.world_size if old is not None else 1,
                position=old.position if old is not None else Position().encode(),
                time=time.time(),
                torch_version=str(torch.__version__),
                elasticrun_version=version(),
                files=tuple(files),
            )
        )
    except BaseException:
        draft.abandon()
        raise


def _job_of(storage: Storage) -> str:
    with suppress(InspectionError):  # The directory may not be there yet.
        for entry in find_entries(storage):
            if entry.checkpoint is not None:
                return entry.checkpoint.manifest.job
    raise InspectionError(
        f"{storage.place} has no checkpoint that could say what the job is called. "
        "Give --job; a job is called like its script's file, as train.py, unless "
        "ELASTICRUN_JOB or --name says otherwise."
    )


def _read(source: Path) -> Any:
    try:
        if source.suffix == _SAFETENSORS:
            return _import_safetensors().load_file(source)
        with open(source, "rb") as file:
            return load_values(file)
    except InspectionError:
        raise
    except Exception as error:  # Whatever a file of another kind makes them raise.
        raise InspectionError(
            f"{source} cannot be read as values that execute nothing when they are "
            f"loaded: {text_of(error)}\nGive a file of safetensors, or one in which "
            "torch.save has put a state dictionary."
        ) from error


def _keys_of(newest: Checkpoint | None, state: str) -> set[Any]:
    """Return the keys that a state has in a checkpoint; none if it cannot tell."""
    if newest is not None and newest.has(state):
        with suppress(InspectionError):  # Damaged, which --force may replace.
            values = load_file(newest, state)
            return set(values) if isinstance(values, Mapping) else set()
    return set()


def _with_prefix_of(keys: set[Any], values: Any) -> Any:
    """Return values from a file with the prefix that their state's keys have.

    A module of one part that is called `module` has it by right, and without it the
    program would refuse its own export.
    """
    is_named = isinstance(values, Mapping) and all(isinstance(k, str) for k in values)
    if not is_named or values.keys() == keys:
        return values
    longer = {f"{_PREFIX}{key}": value for key, value in values.items()}
    if longer.keys() == keys:
        return longer
    if _is_common(values):
        shorter = set_prefix(values, False)
        return shorter if shorter.keys() == keys or not _is_common(keys) else values
    return longer if _is_common(keys) else values


def _is_common(keys: Collection[Any]) -> bool:
    """Return whether all begin with `module.`."""
    has_all = all(isinstance(key, str) and key.startswith(_PREFIX) for key in keys)
    return len(keys) > 0 and has_all
