"""What a rank saves, as it is at the boundary."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.memory import (
    Captured,
    Memory,
    NoMemoryLeftError,
    start_checksums,
)
from elasticrun.checkpoint.recorded import FileRecord
from elasticrun.checkpoint.state import BaseState
from elasticrun.errors import CheckpointWarning, text_of
from elasticrun.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One file: what writes it, and its content if that is in memory already."""

    file_name: str
    save: Callable[[BinaryIO], object]
    captured: Captured | None = None

    def write(self, draft: Draft) -> FileRecord:
        """Write the file into a draft.

        Raises:
            OSError: It could not be written.
            Exception: What the state's `save` raised, if it had not run before.
        """
        if self.captured is None:
            return draft.write(self.file_name, self.save)
        return draft.write_captured(self.file_name, self.captured)


def _save_of(state: BaseState) -> Callable[[BinaryIO], object]:
    """Return a state's `save`; a stream that lacks something is no failing disk."""

    def save(fileobj: BinaryIO) -> object:
        try:
            return state.save(fileobj)
        except io.UnsupportedOperation as error:  # Of all things an OSError.
            raise TypeError(
                f"the save of the state {state.name!r} ({type(state).__name__}) asked "
                f"its stream for what that cannot do: {error}. Checkpoints are written "
                "from the beginning to the end, so there is no seek or tell. Write "
                "into an io.BytesIO first, and then its getvalue() into the stream."
            ) from error

    return save


@dataclass(frozen=True)
class Capture:
    """Everything of the job at a boundary that its checkpoint needs from this rank.

    Attributes:
        position: The job's, encoded.
        parts: The files that this rank writes.
        carried: Files of the newest checkpoint that no state has claimed yet.
        values: What the best checkpoint is told by.
        problem: Why this rank has nothing to write; None if it has.
        file_names: What all ranks write together, as this one sees it.
        is_in_memory: Whether training may go on while it is written.
    """

    number: int
    position: dict[str, Any]
    parts: tuple[Part, ...] = ()
    carried: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    file_names: tuple[str, ...] = ()
    is_in_memory: bool = False


class Capturer:
    """Captures this rank's states.

    Args:
        best: The value by which the best checkpoint is told, "max" or "min"; or None.
        is_async: Whether to keep memory for all that this rank writes; else states
            write their files themselves, while training waits.
    """

    def __init__(
        self,
        registry: Registry,
        rank: int,
        world_size: int,
        *,
        best: tuple[str, str] | None,
        is_async: bool,
    ) -> None:
        self._registry = registry
        self._rank = rank
        self._world_size = world_size
        self._best = best
        self._memory = Memory() if is_async else None
        self._has_warned = False

    def capture(
        self, number: int, position: dict[str, Any], newest: Checkpoint | None
    ) -> Capture:
        """Return everything that is to be saved of this boundary.

        Raises:
            Exception: What a state's `save` raised, other than OSError.
        """
        own = [
            Part(state.file_name(self._rank), _save_of(state))
            for state in self._registry
            if self._rank == 0 or state.is_per_replica
        ]
        parts = tuple(own)
        problem: str | None = None
        is_in_memory = False
        if self._memory is not None:
            try:
                parts, is_in_memory = self._into_memory(own, self._memory), True
            except NoMemoryLeftError as error:
                self._memory = None
                logger.warning(
                    "there is no memory for a copy of what is saved (%s), so training "
                    "waits while it is written, as with async_save=False",
                    error,
                )
            except OSError as error:
                parts, problem = (), text_of(error)
        return Capture(
            number,
            position,
            parts,
            carried=tuple(self._registry.carried_over(newest)),
            values=self._values(),
            problem=problem,
            file_names=tuple(self._registry.file_names(self._world_size)),
            is_in_memory=is_in_memory,
        )

    def forget(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory = Memory()

    def _into_memory(self, parts: list[Part], memory: Memory) -> tuple[Part, ...]:
        memory.clear()
        memory.num_threads = torch.get_num_threads()
        captured = [memory.capture(part.save) for part in parts]
        start_checksums(captured)
        return tuple(
            Part(part.file_name, part.save, content)
            for part, content in zip(parts, captured, strict=True)
        )

    def _values(self) -> dict[str, float]:
        """Return the value by which the best checkpoint is told, if it has one now."""
        if self._best is None:
            return {}
        try:
            name, value = self._registry.find_value(self._best[0])
        except KeyError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"keep_best={self._best!r}: {error.args[0]}, so no checkpoint can "
                    "be the best. Make a Variables with that value before the first "
                    "save.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return {}
        return {} if value is None else {name: value}
