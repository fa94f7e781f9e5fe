"""The registry: the job's states by name, and what of a checkpoint is unclaimed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.state import BaseState, state_of_file
from elasticrun.checkpoint.tensors import UnpicklingError
from elasticrun.errors import CheckpointError, StateNameError


class Registry:
    """The states of one replica, in the order in which the program registered them.

    Attributes:
        not_found: The names of those that a checkpoint did not have.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._states: dict[str, BaseState] = {}
        self.not_found: set[str] = set()

    def __iter__(self) -> Iterator[BaseState]:
        for state in self._states.values():
            yield state
            yield from state.parts()

    def add(self, state: BaseState) -> None:
        """Take a state.

        Raises:
            StateNameError: Another state has its name, or one that some file systems
                would not tell apart.
            CheckpointError: It cannot be saved with those that are there.
        """
        for name, other in self._states.items():
            if name.lower() == state.name.lower():
                raise StateNameError(
                    f"the name {state.name!r} is taken by a {type(other).__name__}. "
                    "Two states of one name would overwrite each other in each "
                    "checkpoint. Give one of them another name."
                )
        state.meet(self)
        self._states[state.name] = state

    def load(self, state: BaseState, checkpoint: Checkpoint | None) -> bool:
        """Load a state if the checkpoint has it; return whether it had.

        What it overwrites is loaded once more: a scheduler that is made when its
        optimizer is loaded already sets the learning rate of the beginning.

        Raises:
            CheckpointError: The file is damaged, or does not fit, or is of the other
                kind: shared by all ranks, or one rank's own.
        """
        is_loaded = self._load_one(state, checkpoint)
        if checkpoint is not None and not is_loaded:
            self.not_found.add(state.name)
        if is_loaded and (overwritten := state.overwrites) is not None:
            for other in self:
                if other.target is overwritten:
                    self._load_one(other, checkpoint)
        return is_loaded

    def _load_one(self, state: BaseState, checkpoint: Checkpoint | None) -> bool:
        file_name = state.file_name(self._rank)
        if checkpoint is None:
            return False
        _check_kind(state, checkpoint)
        if not checkpoint.has(file_name):
            return False
        with checkpoint.open(file_name) as file:
            try:
                state.load_with(file, checkpoint.open)
            except UnpicklingError as error:
                raise CheckpointError(f"{checkpoint.path}: {error}") from error
        return True

    def find_value(self, name: str) -> tuple[str, float | None]:
        """Return what `name` or `state.name` means: the longer name, and the value.

        The value is None if it is no number.

        Raises:
            KeyError: There is none, or the states have several.
        """
        found = [
            (state.name, key, value)
            for state in self
            for key, value in state.values().items()
            if name in (key, f"{state.name}.{key}")
        ]
        if len(found) != 1:
            several = " and ".join(f"{state}.{key}" for state, key, _ in found)
            raise KeyError(
                f"{name!r} is {several}; name one of them"
                if several
                else f"no Variables have {name!r}"
            )
        ((state_name, key, value),) = found
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        return f"{state_name}.{key}", number if math.isfinite(number) else None

    def file_names(self, world_size: int) -> list[str]:
        """Return the files that the states of all ranks make, without carry-overs."""
        return [
            state.file_name(rank)
            for state in self
            for rank in (range(world_size) if state.is_per_replica else (0,))
        ]

    def carried_over(self, checkpoint: Checkpoint | None) -> list[str]:
        """Return the files of the checkpoint that no registered state has claimed."""
        if checkpoint is None:
            return []
        return [n for n in checkpoint.names() if state_of_file(n) not in self._states]


def _check_kind(state: BaseState, checkpoint: Checkpoint) -> None:
    """Raise if it was shared when it was saved and is per replica now, or reversed.

    It would begin anew without a word, and what was saved would not be kept: its name
    is claimed. Shards of a shared state are beside a file for all, which it loads.
    """
    has_shared = checkpoint.has(state.name)
    has_any = any(state_of_file(each) == state.name for each in checkpoint.names())
    if not has_any or has_shared != state.is_per_replica:
        return
    kinds = ["one file for all ranks", "a file of its own for each rank"]
    before, now = kinds if has_shared else kinds[::-1]
    raise CheckpointError(
        f"{checkpoint.path} has {before} of {state.name!r}, but in this program it has "
        f"{now} (is_per_replica = {state.is_per_replica}), so what was saved would be "
        f"lost. Set is_per_replica = {not state.is_per_replica} in its class, as it "
        "was when it was saved; or give it another name, under which it begins anew; "
        "or start anew with another checkpoint directory."
    )
