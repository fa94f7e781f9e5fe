"""Nested values and tensors as bytes that execute nothing when they are loaded."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, runtime_checkable

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.serialization import add_safe_globals, get_safe_globals
from torch.utils.serialization import config

from elasticrun.checkpoint.dtypes import keeping_dtypes
from elasticrun.checkpoint.nested import find_doubtful, map_leaves
from elasticrun.checkpoint.parameter_names import by_numbers
from elasticrun.checkpoint.shards import OpenFile, SavedState, read_whole_state
from elasticrun.checkpoint.state import BaseState
from elasticrun.errors import CheckpointError, text_of

# What a lazy module has before its first batch: a dtype and a device.
_NO_TENSORS_YET = frozenset((UninitializedParameter, UninitializedBuffer))
# What a class that is gone, or has changed, makes an unpickler raise.
_UNPICKLING_ERRORS = (
    *(ImportError, AttributeError, pickle.UnpicklingError),
    *(RuntimeError, ValueError, LookupError, TypeError),
)
_TORCHS_ADVICE = re.compile(
    r"Please use .*| or (types|classes) allowlisted via `add_safe_globals`", re.DOTALL
)
_DTENSOR = "DTensor"
_SHARDED = {_DTENSOR, "ShardedTensor", "FullyShardedDataParallel"}


@runtime_checkable
class Stateful(Protocol):
    """What `torch.distributed.checkpoint.stateful.Stateful` asks for."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state."""
        ...


class StatefulState(BaseState):
    """Keeps any object that has `state_dict` and `load_state_dict`."""

    takes_shards = False  # Whether its tensors may be DTensors.

    def __init__(self, name: str, target: Stateful) -> None:
        super().__init__(name)
        _refuse_sharded(name, target, is_dtensor_right=self.takes_shards)
        self.target: Stateful = target

    def save(self, fileobj: BinaryIO) -> None:
        """Write the object's state dictionary with `torch.save`."""
        values = self.target.state_dict()
        save_state(self, values, fileobj)

    @property
    def overwrites(self) -> object:
        """A scheduler's optimizer, in which its constructor sets the learning rate."""
        if not isinstance(self.target, LRScheduler):
            return None
        optimizer = self.target.optimizer
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        is_kept = rates == [float(rate) for rate in self.target.get_last_lr()]
        return None if is_kept else optimizer

    def load(self, fileobj: BinaryIO) -> None:
        """Give the object its state; its tensors stay on their devices.

        Raises:
            CheckpointError: The saved state does not fit the object, or would execute
                code.
        """
        self.take(load_state(self, fileobj, is_copied=_copies(self.target)))

    def load_with(self, fileobj: BinaryIO, open_file: OpenFile) -> None:
        """Load it; of a sharded one, put every tensor together."""
        values = load_state(self, fileobj, is_copied=_copies(self.target))
        saved = SavedState.decode(values)
        if saved is not None:
            values = by_numbers(read_whole_state(self.name, saved, open_file))
        self.take(values)

    def take(self, values: Any) -> None:
        """Give the object loaded values.

        Raises:
            CheckpointError: They do not fit it.
        """
        try:
            with keeping_dtypes(self.target):
                self.target.load_state_dict(values)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the saved state {self.name!r} does not fit the "
                f"{type(self.target).__name__} of this program: {error}\n"
                "Build the object as it was when it was saved, or start anew with "
                "another checkpoint directory."
            ) from error


def has_shards(target: Any) -> bool:
    """Return whether an object has DTensors, of which each replica has a part."""
    return _DTENSOR in _sharded_kinds(target)


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor: all of it unless it is a DTensor."""
    if type(tensor).__name__ != _DTENSOR:
        return tensor
    sharded: Any = tensor
    local: torch.Tensor = sharded.to_local()
    return local


def _refuse_sharded(name: str, target: Any, *, is_dtensor_right: bool) -> None:
    """Raise for what each replica has another part of, while rank 0 writes for all."""
    kinds = _sharded_kinds(target) - ({_DTENSOR} if is_dtensor_right else set())
    if not kinds:
        return
    advice = (
        "Give the module itself to register(), with its optimizer, and multiply the "
        "loss with loader.loss_weight."
        if kinds == {_DTENSOR}
        else "Shard it with torch.distributed.fsdp.fully_shard, or use "
        "AdaptiveDataParallel."
    )
    raise CheckpointError(
        f"{name!r} is sharded ({', '.join(sorted(kinds))}): each replica has a part of "
        "it, but rank 0 would write for all, so the other parts would be lost. "
        f"{advice}"
    )


def _sharded_kinds(target: Any) -> set[str]:
    """Return the names of torch's types of which each replica has a part."""
    found: list[Any] = []
    if isinstance(target, nn.Module):
        found = [*target.parameters(), *target.buffers(), *target.modules()]
    elif isinstance(target, Optimizer):
        found = [p for group in target.param_groups for p in group["params"]]
    return {
        kind.__name__
        for kind in map(type, found)
        if kind.__name__ in _SHARDED and kind.__module__.startswith("torch.")
    }


class UnsafeValuesError(CheckpointError):
    """Values that only a full unpickler could rebuild, which executes what they say."""


class UnpicklingError(CheckpointError):
    """A state that is trusted, but not rebuilt: it misses a class that it had."""


def save_state(state: BaseState, values: Any, fileobj: BinaryIO) -> None:
    """Write a state's values, of any kind if it is trusted to be unpickled.

    Raises:
        CheckpointError: They could not be loaded safely again.
    """
    if state.trusts_pickle:
        with _refusing_cycles(state.name):
            _refuse_shards_among(values, state.name)
        save_values(values, fileobj, pickle_module=cloudpickle)
    else:
        check_loads_safely(values, name=state.name)
        save_values(values, fileobj)


def load_state(state: BaseState, fileobj: BinaryIO, *, is_copied: bool = False) -> Any:
    """Read a state's values; executes nothing unless it is trusted to be unpickled.

    Args:
        is_copied: Whether whoever takes the tensors keeps none of them.

    Raises:
        UnsafeValuesError: It would have to execute something.
        UnpicklingError: It is trusted, and what it executes has failed.
    """
    if state.trusts_pickle:
        return _unpickle(state, fileobj)
    try:
        return load_values(fileobj, is_copied=is_copied)
    except UnsafeValuesError as error:
        raise UnsafeValuesError(
            f"the saved state {state.name!r} holds what only a full unpickler could "
            f"rebuild: {error}\nThat executes whatever the file says. If you trust all "
            "who can write to the checkpoint directory, name the state in "
            f"init(trust_pickle=[{state.name!r}]); else start anew with another "
            "checkpoint directory."
        ) from error


def _unpickle(state: BaseState, fileobj: BinaryIO) -> Any:
    try:
        return torch.load(fileobj, map_location="cpu", weights_only=False)
    except _UNPICKLING_ERRORS as error:
        raise UnpicklingError(
            f"the saved state {state.name!r} could not be unpickled: {text_of(error)}\n"
            "What it holds is made by classes of this program, which must be where "
            "they were when it was saved, and take what they gave then. Put them back "
            "(an alias under the old name will do), or start anew with another "
            "checkpoint directory."
        ) from error


def save_values(values: Any, fileobj: BinaryIO, *, pickle_module: Any = pickle) -> None:
    """Write nested values; `torch.load` reads the file.

    NumPy's numbers become Python's. The file has its own checksum in the manifest, so
    torch need not compute another. What is on a GPU comes through pinned memory, which
    torch keeps for the next time.
    """
    settings: Any = config.save
    wanted = {"compute_crc32": False, "use_pinned_memory_for_d2h": True}
    # Older versions of torch have only some of them.
    before = {
        name: getattr(settings, name) for name in wanted if hasattr(settings, name)
    }
    for name in before:
        setattr(settings, name, wanted[name])
    try:
        torch.save(
            map_leaves(values, _plain_number), fileobj, pickle_module=pickle_module
        )
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def load_values(fileobj: BinaryIO, *, is_copied: bool = False) -> Any:
    """Read nested values onto the CPU; executes nothing.

    On the CPU, because a tensor is saved with the device of the replica that wrote it;
    whoever takes it copies it to its own.

    Args:
        is_copied: Whether the tensors may be the file's own pages, from which they are
            only copied, in a third of the time.

    Raises:
        UnsafeValuesError: A value is none that could be read like that.
    """
    path = _path_of_open(fileobj) if is_copied else None
    source: Any = fileobj if path is None else path
    _allow_no_tensors_yet()
    try:
        # Said outright, so that no variable of the environment can say otherwise.
        return torch.load(
            source, map_location="cpu", weights_only=True, mmap=path is not None
        )
    except pickle.UnpicklingError as error:
        raise UnsafeValuesError(_reason(error)) from error


def _allow_no_tensors_yet() -> None:
    """Let torch load them from now on.

    For good, since torch has one set for the process: to take them out again would
    take them from the program, or from another thread that loads.
    """
    if missing := _NO_TENSORS_YET - set(get_safe_globals()):
        add_safe_globals(list(missing))


def _path_of_open(fileobj: BinaryIO) -> str | None:
    """Return a path to the very file that is open, or None if it has none."""
    try:
        path = f"/proc/self/fd/{fileobj.fileno()}"
    except OSError:  # In memory.
        return None
    return path if os.path.exists(path) else None


def _copies(target: object) -> bool:
    """Return whether it copies what it loads, as modules of torch.nn's parts do."""
    return isinstance(target, nn.Module) and all(
        getattr(type(part), name).__module__.startswith(("torch.nn.", "elasticrun."))
        for part in target.modules()
        for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    )


def check_loads_safely(values: Any, *, name: str) -> None:
    """Raise while nothing is lost if `values` could be saved but not loaded again.

    Raises:
        CheckpointError: They hold an object that only a full unpickler could rebuild,
            a tensor that is sharded, or themselves.
    """
    with _refusing_cycles(name):
        _refuse_shards_among(values, name)
        doubtful = _smallest_tensors(find_doubtful(values))
    if not doubtful:
        return
    buffer = io.BytesIO()
    try:
        save_values(doubtful, buffer)
        buffer.seek(0)
        load_values(buffer)
    except Exception as error:
        raise CheckpointError(
            f"the state {name!r} holds something that cannot be loaded safely: "
            f"{_first_line(error)}\nA checkpoint executes nothing when it is loaded, "
            "so it takes tensors, numbers, text, and lists, tuples, sets and "
            "dictionaries of them. Convert the rest (arrays with torch.as_tensor), or "
            "write a State with save and load. If you trust all who can write to the "
            f"checkpoint directory, init(trust_pickle=[{name!r}]) takes any object."
        ) from error


@contextmanager
def _refusing_cycles(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise CheckpointError(
            f"the state {name!r} holds something that holds itself, or that is nested "
            "too deep to be saved. Let it name what it leads back to, by a key or a "
            "number."
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
        if not isinstance(value, torch.Tensor) or _has_doubtful(value):
            others.append(value)
        elif _size(value) <= _size(tensors.setdefault(kind, value)):
            tensors[kind] = value
    return [*others, *tensors.values()]


def _has_doubtful(tensor: torch.Tensor) -> bool:
    return any(True for _ in find_doubtful(vars(tensor)))


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


def _plain_number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def _refuse_shards_among(values: Any, name: str) -> None:
    """Raise for a sharded tensor, of which rank 0 would write its own part for all."""

    def check(leaf: Any) -> Any:
        if type(leaf).__name__ in _SHARDED:
            raise CheckpointError(
                f"the state {name!r} holds a {type(leaf).__name__}, of which each "
                "replica has a part, but rank 0 writes for all. Give the module and "
                "the optimizer that it belongs to to register()."
            )
        return leaf

    map_leaves(values, check)
