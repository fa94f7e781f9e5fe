"""Nested values and tensors to bytes and back; loading executes nothing."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.serialization import add_safe_globals, get_safe_globals
from torch.utils.serialization import config

from elasticrun.checkpoint.states.copies import StateCopier
from elasticrun.checkpoint.states.nested import (
    decode_scalar,
    encode_scalar,
    find_maybe_unsafe,
    map_leaves,
    map_paths,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.errors import CheckpointError, text_of

# What a lazy module has before its first batch: a dtype and a device.
_UNINITIALIZED = frozenset((UninitializedParameter, UninitializedBuffer))
# What a class that is gone, or has changed, makes an unpickler raise.
_UNPICKLING_ERRORS = (
    *(ImportError, AttributeError, pickle.UnpicklingError),
    *(RuntimeError, ValueError, LookupError, TypeError),
)
_TORCHS_ADVICE = re.compile(
    r"Please use .*| or (types|classes) allowlisted via `add_safe_globals`", re.DOTALL
)
# Torch's types of which each replica has a part.
SHARDED_KINDS = {"DTensor", "ShardedTensor", "FullyShardedDataParallel"}


class UnsafeValuesError(CheckpointError):
    """Values that only a full unpickler could rebuild, which executes what they say."""


def save_values_of(state: BaseState, values: Any, fileobj: BinaryIO) -> None:
    """Write a state's values, of any kind if it is trusted to be unpickled."""
    if state.trusts_pickle:
        with _refusing_cycles(state.name):
            _refuse_shards_among(values, state.name)
        save_values(values, fileobj, pickle_module=cloudpickle)
    else:
        check_loads_safely(values, name=state.name)
        save_values(values, fileobj)


def begin_to_save(
    state: BaseState, values: Any, copies: StateCopier
) -> tuple[Callable[[BinaryIO], object], bool]:
    """Return what writes a state's values, and if another thread may do it later."""
    copy_of = None if state.trusts_pickle else copies.copy(values)
    if copy_of is None:
        return partial(save_values_of, state, values), False
    return lambda file: save_values(copy_of(), file), True


def load_values_of(
    state: BaseState, fileobj: BinaryIO, *, is_copied: bool = False
) -> Any:
    """Read a state's values; executes nothing unless it is trusted to be unpickled.

    Args:
        is_copied: Whether whoever takes the tensors keeps none of them.
    """
    if state.trusts_pickle:
        return _unpickle(state, fileobj)
    try:
        return load_values(fileobj, is_copied=is_copied)
    except UnsafeValuesError as error:
        raise CheckpointError(
            f"the saved state {state.name!r} holds objects that only a full unpickler "
            f"could load: {error}\nThat may execute any code in the file. If you trust "
            "all who can write to the checkpoint directory, name the state in "
            f"init(trust_pickle=[{state.name!r}]); else start anew with another "
            "checkpoint directory."
        ) from error


def _unpickle(state: BaseState, fileobj: BinaryIO) -> Any:
    try:
        return torch.load(fileobj, map_location="cpu", weights_only=False)
    except _UNPICKLING_ERRORS as error:
        raise CheckpointError(
            f"the saved state {state.name!r} could not be unpickled: {text_of(error)}\n"
            "It holds objects of the program's own classes, which must be found where "
            "they were when it was saved, and accept what they saved. Put the classes "
            "back (an alias under the old name is enough), or start anew with another "
            "checkpoint directory."
        ) from error


def save_values(values: Any, fileobj: BinaryIO, *, pickle_module: Any = pickle) -> None:
    """Write nested values; `torch.load` reads the file.

    NumPy's scalars become bytes that `load_values` knows, unless whatever reads the
    file unpickles all. The file has its own checksum in the manifest, so torch need not
    compute another. What is on a GPU comes through pinned memory, which torch keeps for
    the next time, if the system gives any.
    """
    settings: Any = config.save
    largest = 0

    def note_and_convert(value: Any) -> Any:
        nonlocal largest
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            largest = max(largest, value.numel() * value.element_size())
        return encode_scalar(value) if pickle_module is pickle else value

    values = map_leaves(values, note_and_convert)
    wanted = {
        "compute_crc32": False,
        "use_pinned_memory_for_d2h": largest > 0 and can_pin(largest),
    }
    # Older versions of torch have only some of them.
    before = {
        name: getattr(settings, name) for name in wanted if hasattr(settings, name)
    }
    for name in before:
        setattr(settings, name, wanted[name])
    try:
        torch.save(values, fileobj, pickle_module=pickle_module)
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def can_pin(num_bytes: int) -> bool:
    """Return whether that much pinned memory can be had.

    torch keeps what it is given here, and uses it for one tensor after another.
    """
    try:
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # The system's limit, or its memory, is exhausted.
        return False
    return True


def load_values(fileobj: BinaryIO, *, is_copied: bool = False) -> Any:
    """Read nested values onto the CPU; executes nothing.

    On the CPU, because a tensor is saved with the device of the replica that wrote it;
    whoever takes it copies it to its own.

    Args:
        is_copied: Whether the tensors may be the file's own pages, from which they are
            only copied, in a third of the time.
    """
    path = _path_of_open(fileobj) if is_copied else None
    source: Any = fileobj if path is None else path
    _allow_uninitialized()
    try:
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            # Said outright, so that no variable of the environment can say otherwise.
            values = torch.load(
                source, map_location="cpu", weights_only=True, mmap=path is not None
            )
    except pickle.UnpicklingError as error:
        raise UnsafeValuesError(_reason(error)) from error
    return map_leaves(values, decode_scalar)


def _allow_uninitialized() -> None:
    """Let torch load uninitialized parameters from now on.

    For good, since torch has one set for the process: to take them out again would
    take them from the program, or from another thread that loads.
    """
    if missing := _UNINITIALIZED - set(get_safe_globals()):
        add_safe_globals(list(missing))


def _path_of_open(fileobj: BinaryIO) -> str | None:
    """Return a path to the very file that is open, or None if it has none."""
    try:
        path = f"/proc/self/fd/{fileobj.fileno()}"
    except OSError:  # In memory.
        return None
    return path if os.path.exists(path) else None


def check_loads_safely(values: Any, *, name: str) -> None:
    """Raise while nothing is lost if `values` could be saved but not loaded again."""
    with _refusing_cycles(name):
        _refuse_shards_among(values, name)
        doubtful = _smallest_tensors(find_maybe_unsafe(values))
    if not doubtful:
        return
    try:
        _try_to_load(doubtful)
    except Exception as error:
        raise CheckpointError(
            f"the state {name!r} holds something that cannot be loaded safely: "
            f"{_first_line(error)}{_say_where(values)}\nA checkpoint executes nothing "
            "when it is loaded, so it takes tensors, numbers, text, and lists, tuples, "
            "sets and dictionaries of them. Convert the rest (arrays with "
            "torch.as_tensor), or write a State with save and load. If you trust all "
            "who can write to the checkpoint directory, "
            f"init(trust_pickle=[{name!r}]) takes any object."
        ) from error


def _try_to_load(values: Any) -> None:
    buffer = io.BytesIO()
    save_values(values, buffer)
    buffer.seek(0)
    load_values(buffer)


def _say_where(values: Any) -> str:
    """Return which of nested values cannot be loaded; nothing if it is a key, say."""
    found: list[str] = []

    def check(path: str, leaf: Any) -> None:
        try:
            if not found:
                _try_to_load(leaf)
        except Exception:
            found.append(f" (it is {path!r}, a {type(leaf).__name__})" if path else "")

    map_paths(values, check)
    return found[0] if found else ""


@contextmanager
def _refusing_cycles(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise CheckpointError(
            f"the state {name!r} holds an object that contains itself, or that is "
            "nested too deep to be saved. Refer to such objects by a key or a number."
        ) from error


def _smallest_tensors(values: Iterable[Any]) -> list[Any]:
    """Keep one tensor of those that load alike, the smallest.

    They do if they are of one class, which decides how they are saved, and have no
    attributes but what loads surely.
    """
    others: list[Any] = []
    tensors: dict[type, torch.Tensor] = {}
    for value in values:
        kind = type(value)
        if not isinstance(value, torch.Tensor) or list(find_maybe_unsafe(vars(value))):
            others.append(value)
        elif _size(value) <= _size(tensors.setdefault(kind, value)):
            tensors[kind] = value
    return [*others, *tensors.values()]


def _size(tensor: torch.Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.numel()


def _reason(error: pickle.UnpicklingError) -> str:
    """Return why torch refuses a file, without its advice: elasticrun has its own.

    Around what its unpickler has said torch puts how to load the file nevertheless.
    """
    told = error.__context__
    text = str(told if isinstance(told, pickle.UnpicklingError) else error)
    return " ".join(_TORCHS_ADVICE.sub("", text).split()) or type(error).__name__


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0]


def _refuse_shards_among(values: Any, name: str) -> None:
    """Raise for a sharded tensor, of which rank 0 would write its own part for all."""

    def check(leaf: Any) -> Any:
        if type(leaf).__name__ in SHARDED_KINDS:
            map_paths(values, refuse)
        return leaf

    def refuse(path: str, leaf: Any) -> None:
        if type(leaf).__name__ in SHARDED_KINDS:
            raise CheckpointError(
                f"the state {name!r} holds a {type(leaf).__name__}, of which each "
                f"replica has a part, but rank 0 writes for all (it is {path!r}). Give "
                "the module and the optimizer that it belongs to to register()."
            )

    map_leaves(values, check)
