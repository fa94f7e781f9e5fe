"""Copies what a rank saves into memory, at the boundary."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import torch

from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.files.memory import (
    Captured,
    Memory,
    NoMemoryLeftError,
    start_checksums,
)
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.gathered import GatheredState
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.errors import text_of
from elasticrun.logger import Logger

logger = Logger(__name__)

Samples = dict[str, Mapping[str, list[float]]]


class OwnFile(NamedTuple):
    """A file that this rank writes: how, or its content if that is in memory."""

    file_name: str
    save: Callable[[BinaryIO], object]
    captured: Captured | None = None

    def write(self, draft: Draft) -> FileRecord:
        """Write the file into a draft."""
        if self.captured is None:
            return draft.write(self.file_name, self.save)
        return draft.write_captured(self.file_name, self.captured)


def _explaining_streams(
    state: BaseState, write: Callable[[BinaryIO], object]
) -> Callable[[BinaryIO], object]:
    """Wrap `write`, to explain what its stream cannot do.

    `io.UnsupportedOperation` is an OSError, so it would be taken for a failing disk,
    and training would go on without checkpoints.
    """

    def save(fileobj: BinaryIO) -> object:
        try:
            return write(fileobj)
        except io.UnsupportedOperation as error:
            raise TypeError(
                f"the save of the state {state.name!r} ({type(state).__name__}) used "
                f"its stream in a way that it does not support: {error}. Checkpoints "
                "are written in one go, so there is no seek or tell. Write into an "
                "io.BytesIO first, then write its getvalue() to the stream."
            ) from error

    return save


@dataclass(frozen=True)
class Capture:
    """Everything of the job at a boundary that its checkpoint needs from this rank.

    Attributes:
        files: Those that this rank writes.
        gathered: This rank's own of small states, by name; rank 0 writes all of them.
        carried: Files of the newest checkpoint that no state has claimed yet; on rank
            0, which copies them.
        problem: Why this rank has nothing to write; None if it has.
        file_names: What all ranks write together, as rank 0 sees it; on that alone.
        is_in_memory: Whether training may go on while it is written.
        checksums: Of values that are to be the same on all ranks, by `state.name`.
        samples: Sums over parts of states that must not have drifted apart, by state
            and part.
    """

    number: int
    position: dict[str, Any]
    files: tuple[OwnFile, ...] = ()
    gathered: dict[str, bytes] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    problem: str | None = None
    file_names: tuple[str, ...] = ()
    is_in_memory: bool = False
    checksums: dict[str, int] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Disable the garbage collector in the block, which makes many containers.

    After each 700 new containers it looks for garbage among them, and now and then
    among all that the program has: with 1,000 states, training waited longer for that
    than for the copies.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Capturer:
    """Captures this rank's states.

    Args:
        rank: Of what to capture a rank's part; 0 in a rescue, on whatever rank.
        is_async: Whether to keep memory for all that this rank writes; else states
            write their files themselves, while training waits.
    """

    def __init__(
        self, registry: Registry, *, rank: int, world_size: int, is_async: bool
    ) -> None:
        self._registry = registry
        self._rank = rank
        self._world_size = world_size
        self._memory = Memory() if is_async else None

    def prepare(self) -> None:
        """Get memory ready for the first save, in the background: training goes on."""
        if self._memory is not None:
            self._memory.prepare(sum(_num_bytes(state) for state in self._own_states()))

    @_no_garbage_collected()
    def capture(
        self, number: int, position: dict[str, Any], newest: Checkpoint | None
    ) -> Capture:
        """Return everything that is to be saved of this boundary."""
        _wait_for_gpus()
        is_first = self._rank == 0
        files, problem = self._capture_files()
        return Capture(
            number,
            position,
            files,
            gathered={
                state.name: state.capture()
                for state in self._registry
                if isinstance(state, GatheredState)
            },
            carried=tuple(self._registry.carried_over(newest)) if is_first else (),
            problem=problem,
            # With as many names as there are ranks, so that only rank 0 makes them.
            file_names=tuple(self._registry.file_names(self._world_size))
            if is_first
            else (),
            is_in_memory=self._memory is not None and problem is None,
            checksums={
                f"{state.name}.{key}": checksum
                for state in self._registry
                for key, checksum in state.checksums().items()
            },
            samples=self._samples(),
        )

    def _capture_files(self) -> tuple[tuple[OwnFile, ...], str | None]:
        """Return this rank's files, in memory if that can be; or why there are none."""
        own = self._own_states()
        if self._memory is not None:
            try:
                return self._into_memory(own, self._memory), None
            except NoMemoryLeftError as error:
                self._memory = None
                logger.warning(
                    "too little memory for a copy of all states (%s), so training "
                    "waits while they are written, as with async_save=False",
                    error,
                )
            except OSError as error:
                return (), text_of(error)
        files = [
            OwnFile(s.file_name(self._rank), _explaining_streams(s, s.save))
            for s in own
        ]
        return tuple(files), None

    def _own_states(self) -> list[BaseState]:
        """Return the states that this rank writes."""
        return [
            state
            for state in self._registry
            if (self._rank == 0 or state.is_per_replica)
            and not isinstance(state, GatheredState)
        ]

    def forget(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory = Memory()

    def _into_memory(
        self, states: list[BaseState], memory: Memory
    ) -> tuple[OwnFile, ...]:
        """Copy states: the files that they make, or what these can be made of later."""
        memory.clear()  # Of the last save, whose writer has ended: `save` waits for it.
        memory.num_threads = torch.get_num_threads()
        files: list[OwnFile] = []
        for state in states:
            write, may_be_later = state.begin_save()
            content = (
                None
                if may_be_later
                else memory.capture(_explaining_streams(state, write))
            )
            files.append(OwnFile(state.file_name(self._rank), write, content))
        start_checksums([f.captured for f in files if f.captured is not None])
        return tuple(files)

    def _samples(self) -> Samples:
        if self._world_size == 1:
            return {}
        samples = {state.name: state.samples() for state in self._registry}
        return {name: parts for name, parts in samples.items() if parts}


def _num_bytes(state: BaseState) -> int:
    """Return how much this rank has of a module or an optimizer, where most is."""
    target, tensors = state.target, []
    if isinstance(target, torch.nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    elif isinstance(target, torch.optim.Optimizer):
        entries = [each for of in target.state.values() for each in of.values()]
        tensors = [each for each in entries if isinstance(each, torch.Tensor)]
    return sum(local_shard(each).nbytes for each in tensors)


def _wait_for_gpus() -> None:
    """Synchronize with all GPUs, on every stream.

    States are read on the current stream, or in host memory that a copy may still be on
    its way to; what a program does on streams of its own they would miss.
    """
    if not torch.cuda.is_initialized():
        return
    for number in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(number):  # Or it would be given a context.
            torch.cuda.synchronize(number)
