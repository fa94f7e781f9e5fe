"""The state of an object that has `state_dict` and `load_state_dict`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.checkpoint.states.copies import StateCopier
from elasticrun.checkpoint.states.loading import (
    keeping_dtypes,
    refuse_other_kinds,
    try_rates,
)
from elasticrun.checkpoint.states.module_watch import ModuleWatch
from elasticrun.checkpoint.states.nested import map_paths
from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.checkpoint.states.shards import OpenFile, SavedState, read_whole_state
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.checkpoint.states.values import (
    SHARDED_KINDS,
    begin_to_save,
    load_values_of,
    save_values_of,
)
from elasticrun.errors import CheckpointError
from elasticrun.logger import Logger
from elasticrun.replicas.gathering import gather, num_replicas, own_rank

logger = Logger(__name__)

_DTENSOR = "DTensor"
_NUM_PARTS = 64  # What is sent does not grow with the number of tensors,
_NUM_ELEMENTS = 4096  # nor what is read with their size.
_MOST_VALUES = 1 << 12  # Of a tensor; what counts something is small.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


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
        _refuse_sharded(name, target)
        _refuse_meta(name, target)
        self.target: Stateful = target
        self._consolidate = getattr(target, "consolidate_state_dict", None)
        self._copies = StateCopier()
        self._plain = _plain_tensors(target)
        self._memory = (
            ModuleWatch(name, target, self.has_common_statistics)
            if isinstance(target, nn.Module)
            else None
        )

    def save(self, fileobj: BinaryIO) -> None:
        save_values_of(self, self.values_to_save(), fileobj)

    def begin_save(self) -> tuple[Callable[[BinaryIO], object], bool]:
        return begin_to_save(self, self.values_to_save(), self._copies)

    def sync(self) -> None:
        """Bring what is to be saved to rank 0, or refuse what cannot be. Collective.

        A `ZeroRedundancyOptimizer` has its parts brought there. Of an object of the
        program's own rank 0 has one state, and others may have another.
        """
        if self._consolidate is not None:
            self._consolidate(to=0)
        elif not is_torchs(self.target) and num_replicas() > 1:
            self._check_same_on_all_ranks()

    def _check_same_on_all_ranks(self) -> None:
        digests = gather(_digest_of(self.target.state_dict()))
        others = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if others:
            kind = type(self.target).__name__
            raise CheckpointError(
                f"{self.name!r} ({kind}) has another state on rank "
                f"{', '.join(map(str, others))} than on rank 0. Only rank 0's would be "
                "saved, and all replicas would load it after a restart. Sum over "
                "replicas with an Accumulator or a metric of torchmetrics, make it the "
                "same everywhere by an all-reduce, or write a State with "
                "is_per_replica = True."
            )

    def current(self) -> Any:
        # A `ZeroRedundancyOptimizer` has its whole state on one replica at a time.
        return self.target.state_dict() if self._consolidate is None else self.target

    def put_back(self, values: Any) -> None:
        if self._consolidate is None:
            StatefulState.set_values(self, values)

    def remember(self) -> Callable[[], None] | None:
        if self._consolidate is not None or self.takes_shards:
            raise CannotRescueError(f"each replica has a part of {self.name!r}")
        if isinstance(self.target, torch.amp.GradScaler):
            return lambda: None  # It changes in a step, and reading it waits for GPUs.
        return None if self._memory is None else self._memory.remember()

    def has_common_statistics(self) -> bool:
        """Return whether this replica's BatchNorms have the averages to be saved."""
        return own_rank() == 0

    def committed(self) -> None:
        """Name, once, what has changed of a module and is in no checkpoint."""
        now = _plain_tensors(self.target) if self._plain else {}
        changed = [each for each in now if _differ(now[each], self._plain.get(each))]
        if not changed:
            return
        self._plain = {}
        if own_rank() == 0:
            logger.warning(
                "%r has tensors that have changed and are in no checkpoint: %s. After "
                "a restart they are as at the start. Make those that count buffers of "
                'their module: self.register_buffer("name", tensor).',
                self.name,
                ", ".join(changed),
            )

    def samples(self) -> Mapping[str, list[float]]:
        """Return sums over elements of a module's parameters, by neighbours' names.

        Without those that are not trained: one replica alone may follow with a copy.
        """
        target = None if self.takes_shards else self.target
        every = target.named_parameters() if isinstance(target, nn.Module) else ()
        named = [
            (name, each)
            for name, each in every
            if each.requires_grad and not isinstance(each, UninitializedParameter)
        ]
        bounds = [len(named) * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
        groups = [named[start:stop] for start, stop in pairwise(bounds) if start < stop]
        if not groups:
            return {}
        with torch.no_grad():
            sums = torch.stack([_sums([each for _, each in group]) for group in groups])
        return {
            ", ".join(name for name, _ in group): values
            for group, values in zip(groups, sums.tolist(), strict=True)
        }

    def values_to_save(self) -> Any:
        return self.target.state_dict()

    def load(self, fileobj: BinaryIO) -> None:
        """Give the object its state; its tensors stay on their devices."""
        self.set_values(
            load_values_of(self, fileobj, is_copied=_loads_by_copying(self.target))
        )

    def load_with(self, fileobj: BinaryIO, open_file: OpenFile) -> None:
        """Load it; of a sharded one, put every tensor together."""
        values = load_values_of(self, fileobj, is_copied=_loads_by_copying(self.target))
        saved = SavedState.decode(values)
        if saved is not None:
            values = read_whole_state(self.name, saved, open_file)
        self.set_values(values)

    def set_values(self, values: Any) -> None:
        refuse_other_kinds(self.name, self.target, values)
        try:
            with keeping_dtypes(self.target):
                self.target.load_state_dict(values)
            try_rates(self.target)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"the saved state {self.name!r} does not fit the "
                f"{type(self.target).__name__} of this program: {error}\n"
                "Build the object as it was when it was saved, or start anew with "
                "another checkpoint directory."
            ) from error


def is_torchs(target: object) -> bool:
    """Return whether it needs no comparison: torch's own, and modules.

    Training keeps those the same on all replicas; of other objects nobody knows.
    """
    kinds = (nn.Module, Optimizer, LRScheduler)
    is_own = type(target).__module__.startswith(("torch.", "elasticrun."))
    return is_own or isinstance(target, kinds)


def _sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of magnitudes, and the plain sum: few changes leave both alike."""
    total = torch.zeros(2, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _NUM_ELEMENTS)]
        some = (torch.view_as_real(some) if some.is_complex() else some).double()
        total += torch.stack([some.abs().sum(), some.sum()]).to(total.device)
    return total


def _plain_tensors(target: object) -> dict[str, tuple[torch.Tensor, int]]:
    """Return a module's tensors that are no parameters or buffers, with their versions.

    Without those made of parameters (`weight_norm`, `spectral_norm`), and of metrics,
    which are saved.
    """
    modules = target.named_modules() if isinstance(target, nn.Module) else ()
    return {
        f"{path}.{name}".lstrip("."): (value, value._version)
        for path, module in modules
        if not hasattr(module, "_defaults")
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and not (value.requires_grad or value.is_inference())
        and f"{name}_orig" not in module._parameters
    }


def _differ(
    now: tuple[torch.Tensor, int], before: tuple[torch.Tensor, int] | None
) -> bool:
    return before is not None and (now[0] is not before[0] or now[1] != before[1])


def has_shards(target: Any) -> bool:
    """Return whether an object has DTensors, of which each replica has a part."""
    return _DTENSOR in _sharded_kinds(target)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor: all of it unless it is a DTensor."""
    if type(tensor).__name__ != _DTENSOR:
        return tensor
    sharded: Any = tensor
    local: torch.Tensor = sharded.to_local()
    return local


def _refuse_sharded(name: str, target: Any) -> None:
    """Raise for what each replica has another part of, while rank 0 writes for all."""
    kinds = _sharded_kinds(target) - {_DTENSOR}
    if kinds:
        raise CheckpointError(
            f"{name!r} is sharded ({', '.join(sorted(kinds))}): each replica has a "
            "part of it, but only rank 0 would write, so the other parts would be "
            "lost. Shard it with torch.distributed.fsdp.fully_shard, or use "
            "AdaptiveDataParallel."
        )


def _refuse_meta(name: str, target: Any) -> None:
    """Raise for tensors without memory: torch would load into them without a word."""
    if any(tensor.is_meta for tensor in _tensors_of(target)):
        raise CheckpointError(
            f"{name!r} is on the meta device, which holds no values, so a saved "
            "state would be lost. Call to_empty(device=...) and initialize it "
            "before you register it."
        )


def _tensors_of(target: Any) -> list[torch.Tensor]:
    if isinstance(target, nn.Module):
        return [*target.parameters(), *target.buffers()]
    if isinstance(target, Optimizer):
        return parameters_of(target)
    return []


def _sharded_kinds(target: Any) -> set[str]:
    """Return the names of torch's types of which each replica has a part."""
    found: list[Any] = list(_tensors_of(target))
    if isinstance(target, nn.Module):
        found += target.modules()
    return {
        kind.__name__
        for kind in map(type, found)
        if kind.__name__ in SHARDED_KINDS and kind.__module__.startswith("torch.")
    }


def _loads_by_copying(target: object) -> bool:
    """Return whether loading copies values into tensors that the object has already.

    Modules made of torch.nn's parts do. Then the loaded tensors may be pages of the
    file, since nothing keeps them.
    """
    return isinstance(target, nn.Module) and all(
        getattr(type(part), name).__module__.startswith(("torch.nn.", "elasticrun."))
        for part in target.modules()
        for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    )


def _digest_of(values: Any) -> str:
    """Return a digest of nested values; of large tensors, of some values in them.

    Of objects that are no plain values only the type counts: their `repr` may be their
    address. Values that contain themselves have any digest; saving refuses them.
    """
    digest = hashlib.sha256()
    with suppress(RecursionError):
        map_paths(
            values, lambda path, leaf: digest.update(f"{path}={_text(leaf)};".encode())
        )
    return digest.hexdigest()


def _text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not leaf.is_sparse:
        flat = leaf.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _MOST_VALUES)]
        return f"{leaf.dtype}{list(leaf.shape)}{some.tolist()}"
    if isinstance(leaf, (set, frozenset)):
        return str(sorted(map(_text, leaf)))
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
