"""Modules and optimizers of DTensors: all replicas save them, for any world size."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, empty
from torch.optim import Optimizer

from elasticrun.checkpoint.states.layout import (
    Description,
    Layout,
    TensorSource,
    describe,
    fill,
    make_layout,
)
from elasticrun.checkpoint.states.nested import leaves_by_path, map_paths
from elasticrun.checkpoint.states.optimizer import (
    check_entries,
    check_kind,
    modules_among,
)
from elasticrun.checkpoint.states.parameter_names import (
    by_names,
    by_numbers,
    find_names,
    has_names,
    in_groups,
)
from elasticrun.checkpoint.states.shards import Chunk, OpenFile, SavedState, ShardReader
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.checkpoint.states.values import load_values_of, save_values_of
from elasticrun.errors import AgreementError, CheckpointError
from elasticrun.replicas.gathering import gather, own_rank


class ShardedState(StatefulState):
    """An object whose state holds DTensors.

    Rank 0 writes the state's file: all values that are not sharded, and where the
    chunks of the sharded ones are. Every rank writes its chunks.
    """

    takes_shards = True

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name, target)
        self._chunks = _Chunks(name)
        self._values: Any = None
        self._layout = Layout({}, [])
        self._answers: list[list[str]] = []  # Of all ranks, from which `_layout` is.

    def parts(self) -> Iterable[BaseState]:
        return [self._chunks]

    def sync(self) -> None:
        """Agree with the other replicas on who writes what. Collective."""
        description: Description = {}
        tensors: dict[str, DTensor] = {}
        problem: Exception | None = None
        try:
            self._values, tensors = _take_out(self.name, self.current_values())
            plain = leaves_by_path(self._values).keys() - tensors.keys()
            description = describe(tensors, list(plain))
        except Exception as error:
            problem = error
        self._layout = self._agree(description, problem)
        self._chunks.tensors, self._chunks.own = tensors, self._layout.own[own_rank()]

    def _agree(self, description: Description, problem: Exception | None) -> Layout:
        """Return the layout; the descriptions travel only when one has changed.

        If one replica has a problem, all raise, so that none waits for it.
        """
        text = json.dumps(description, sort_keys=True).encode()
        failure = "" if problem is None else f"{type(problem).__name__}: {problem}"
        answers = self._gather([hashlib.sha256(text).hexdigest(), failure])
        if problem is not None:
            raise problem
        for rank, (_, failure) in enumerate(answers):
            if failure:
                raise CheckpointError(
                    f"{self.name!r} could not be saved, because rank {rank} failed: "
                    f"{failure}"
                )
        if answers == self._answers:
            return self._layout
        layout = make_layout(self.name, self._gather(description))
        self._answers = answers
        return layout

    def _gather(self, value: Any) -> list[Any]:
        try:
            return gather(value)
        except RuntimeError as error:  # What a process group raises without a peer.
            raise AgreementError(
                f"the replicas could not agree on who saves what of {self.name!r} "
                f"({error}). Look at the logs: one of them is gone, or its program "
                "takes another path."
            ) from error

    def after_save(self) -> None:
        self._values = None

    def begin_save(self) -> tuple[Callable[[BinaryIO], object], bool]:
        return self.save, False

    def save(self, fileobj: BinaryIO) -> None:
        """Write what is not sharded, and where the rest is."""
        saved = SavedState(self._values, self._layout.tensors)
        save_values_of(self, saved.encode(), fileobj)

    def load_with(self, fileobj: BinaryIO, open_file: OpenFile) -> None:
        """Give the object its state, from files of any world size or a plain one."""
        values = load_values_of(self, fileobj)
        saved = SavedState.decode(values) or SavedState(values, {})
        with ShardReader(self.name, saved, open_file) as reader:
            self.set_saved(saved, reader)

    @abstractmethod
    def current_values(self) -> Any:
        """Return the object's state as it is saved."""

    @abstractmethod
    def set_saved(self, saved: SavedState, reader: ShardReader) -> None:
        """Give the object a saved state."""


class ShardedModuleState(ShardedState):
    """A module with parameters or buffers that are DTensors."""

    def current_values(self) -> Any:
        return self.target.state_dict()

    def set_saved(self, saved: SavedState, reader: ShardReader) -> None:
        current = leaves_by_path(self.target.state_dict())
        targets: dict[str, Tensor] = {}
        sources: dict[str, TensorSource] = {}
        misfits: list[str] = []

        def place(path: str, leaf: Any) -> Any:
            own = current.get(path)
            source = saved.tensors.get(path, leaf)
            # What is whole in the file and here is loaded as in any module.
            is_whole = path not in saved.tensors and not isinstance(own, DTensor)
            if is_whole or not isinstance(source, TensorSource):
                return leaf
            if own is None:  # The module says that it does not know it.
                return torch.empty(source.shape, device="meta")
            if source.shape != own.shape:
                shapes = f"{list(source.shape)}, here {list(own.shape)}"
                misfits.append(f"{path} is {shapes}")
                return leaf
            # A shard is filled in place; what is whole here alone, in a new tensor.
            if not isinstance(own, DTensor):
                own = torch.empty(source.shape, dtype=source.dtype)
            sources[path], targets[path] = source, own
            return own

        values = map_paths(saved.values, place)
        if misfits:
            raise CheckpointError(
                f"the saved state {self.name!r} does not fit the "
                f"{type(self.target).__name__} of this program: {'; '.join(misfits)}. "
                "Build the object as it was when it was saved, or start anew with "
                "another checkpoint directory."
            )
        fill(targets, sources, reader)
        self.set_values(values)


class ShardedOptimizerState(ShardedState):
    """An optimizer of parameters that are DTensors.

    Saved under the names that these have in registered modules.
    """

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._optimizer = target
        self._modules: list[tuple[str, nn.Module]] = []
        self._parameters: dict[str, Tensor] = {}

    def note_states(self, states: Iterable[BaseState]) -> None:
        self._modules = modules_among(states)
        self._find_names()

    def _find_names(self) -> None:
        self._parameters = find_names(self.name, self._optimizer, self._modules)

    def current_values(self) -> Any:
        self._find_names()  # `add_param_group` may have been called since.
        return by_names(self._optimizer.state_dict(), list(self._parameters))

    def set_saved(self, saved: SavedState, reader: ShardReader) -> None:
        self._find_names()
        check_kind(self.name, self._optimizer, saved.values)
        if not has_names(saved.values):  # It was saved by a program without shards.
            saved = SavedState(by_names(saved.values, list(self._parameters)), {})
        targets: dict[str, Tensor] = {}
        sources: dict[str, TensorSource] = {}

        def place(path: str, leaf: Any) -> Any:
            source = saved.tensors.get(path, leaf)
            parameter = self._parameter_of(path)
            if (
                isinstance(source, TensorSource)
                and isinstance(parameter, DTensor)
                and parameter.shape == source.shape != ()
            ):
                targets[path] = torch.empty_like(parameter, dtype=source.dtype)
            elif path in saved.tensors:
                targets[path] = _replicated(saved.tensors[path], parameter)
            else:
                return leaf
            sources[path] = source
            return targets[path]

        values = map_paths(saved.values, place)
        fill(targets, sources, reader)
        values = by_numbers(values, in_groups(self._parameters, self._optimizer))
        check_entries(self.name, self._optimizer, values, list(self._parameters))
        self.set_values(values)

    def _parameter_of(self, path: str) -> Tensor | None:
        """Return the parameter that `state.model.0.weight.exp_avg`, say, is of."""
        parts = path.split(".")
        if parts[0] != "state":
            return None
        names = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
        return next((self._parameters[n] for n in names if n in self._parameters), None)


def _replicated(source: TensorSource, parameter: Tensor | None) -> Tensor:
    """Return a tensor that is whole on every replica, for one unlike its parameter."""
    if not isinstance(parameter, DTensor):
        return torch.empty(source.shape, dtype=source.dtype)
    return empty(source.shape, dtype=source.dtype, device_mesh=parameter.device_mesh)


class _Chunks(BaseState):
    """The chunks that this replica writes of a sharded state."""

    is_per_replica = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tensors: Mapping[str, DTensor] = {}
        self.own: Sequence[tuple[str, Chunk]] = ()

    def after_save(self) -> None:
        self.tensors = {}

    def save(self, fileobj: BinaryIO) -> None:
        """Write the raw bytes of this replica's chunks."""
        position = 0
        for path, chunk in self.own:
            fileobj.write(bytes(chunk.start - position))
            local = self.tensors[path].to_local().detach()
            if tuple(local.shape) != chunk.sizes:
                raise CheckpointError(
                    f"the shard of {path!r} in {self.name!r} was {chunk.sizes}, and is "
                    f"now {tuple(local.shape)}. It was changed while it was saved."
                )
            data = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            fileobj.write(data)
            position = chunk.start + data.nbytes

    def load(self, fileobj: BinaryIO) -> None:
        """Chunks are read by the state they are of, whoever wrote them."""
        raise TypeError(f"{self.name!r} reads {fileobj} itself")


def _take_out(name: str, values: Any) -> tuple[Any, dict[str, DTensor]]:
    """Return the values with None for each sharded tensor, and these by their paths."""
    tensors: dict[str, DTensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if any(placement.is_partial() for placement in leaf.placements):
            raise CheckpointError(
                f"{path!r} in {name!r} has a pending sum ({leaf.placements}): no "
                "replica has its value. Redistribute it before it is saved."
            )
        tensors[path] = leaf
        return None

    leaves_by_path(values)  # Raises if two have one path.
    return map_paths(values, take), tensors
