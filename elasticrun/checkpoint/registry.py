"""The registry: the job's states by name, and what no state has loaded yet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.states.parameter_names import options_of
from elasticrun.checkpoint.states.state import BaseState, epoch_of, state_of_file
from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import CheckpointError, ElasticRunError, StateNameError, text_of

# States of elasticrun itself: they come and go with settings, and lose nothing by it.
_OWN = re.compile(
    r"random|replay-anchors|once|save-interval|(.+\.)?noise|loader[-.].+"
    r"|accumulator.*\.epoch-\d+"
)

_MOST_NUMBERS = 20


class Registry:
    """The states of one replica, in the order in which the program registered them.

    Attributes:
        not_found: The names of those that a checkpoint did not have.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._states: dict[str, BaseState] = {}
        self._every: list[BaseState] | None = None  # With their parts, if it is known.
        # The options of optimizers' groups as they were loaded.
        self._options: dict[str, list[dict[str, Any]]] = {}
        self._num_ended_epochs = 0  # With which states of epochs have ended.
        self.not_found: set[str] = set()

    def __iter__(self) -> Iterator[BaseState]:
        if self._every is None:  # A boundary asks for them, too.
            states = self._states.values()
            self._every = [each for one in states for each in (one, *one.parts())]
        return iter(self._every)

    def add(self, state: BaseState) -> None:
        for name, other in self._states.items():
            if name.lower() == state.name.lower():
                kind = type(other if other.target is None else other.target)
                is_own = kind.__module__.startswith("elasticrun.")
                is_own &= other.target is None
                by = "another one" if is_own else f"the {kind.__name__}"
                raise StateNameError(
                    f"the name {state.name!r} is taken by {by}, made before. "
                    "Two states of one name would overwrite each other in each "
                    "checkpoint. Give one of them another name (name=, or another "
                    "keyword of register); or, if this is one that is made again in "
                    "each epoch or batch, make it once, before the epoch loop. An "
                    "Accumulator without a name may be made in each epoch."
                )
        state.note_states(self)
        self._states[state.name], self._every = state, None

    def load(self, state: BaseState, checkpoint: Checkpoint | None) -> bool:
        """Load a state if the checkpoint has it; return whether it had.

        Making a scheduler sets the optimizer's learning rate back to the first one. So
        an optimizer that was loaded before its scheduler was made has its options set
        once more, before the scheduler's state is loaded, which may set them, too.
        """
        if checkpoint is not None and checkpoint.has(state.file_name(self._rank)):
            self._set_options_of_held(state.target)
        is_loaded = self.load_alone(state, checkpoint)
        if checkpoint is not None and not is_loaded:
            self.not_found.add(state.name)
        if is_loaded and isinstance(state.target, Optimizer):
            groups = state.target.param_groups
            self._options[state.name] = [options_of(group) for group in groups]
        return is_loaded

    def _set_options_of_held(self, holder: object) -> None:
        """Set options of an object's optimizers whose rates are not as loaded."""
        held = getattr(holder, "__dict__", {}).values()
        for state in self._states.values():
            target = state.target
            is_held = any(target is each for each in held)
            if not (isinstance(target, Optimizer) and is_held):
                continue
            loaded = self._options.get(state.name, [])
            pairs = list(zip(target.param_groups, loaded, strict=False))
            if any(group.get("lr") != options.get("lr") for group, options in pairs):
                for group, options in pairs:
                    group.update(options_of(options))

    def load_alone(self, state: BaseState, checkpoint: Checkpoint | None) -> bool:
        """Load a state, and no other one with it; return whether it was there."""
        if checkpoint is None:
            return False
        _check_kind(state, checkpoint)
        with _explaining(state, checkpoint.path / state.file_name(self._rank)):
            return state.load_from(checkpoint, self._rank)

    def numbers(self) -> dict[str, float]:
        """Return all values that are numbers, the first ones of many."""
        found = (
            (f"{state.name}.{key}", _number(value))
            for state in self
            for key, value in state.values().items()
            if not isinstance(value, str)
        )
        known = ((name, number) for name, number in found if number is not None)
        return dict(islice(known, _MOST_NUMBERS))

    def file_names(self, world_size: int) -> list[str]:
        """Return the files that the states of all ranks make, without carry-overs."""
        return [name for state in self for name in state.file_names(world_size)]

    def carried_over(self, checkpoint: Checkpoint | None) -> list[str]:
        """Return the files of the checkpoint that no registered state has claimed."""
        if checkpoint is None:
            return []
        return [
            file_name
            for file_name in checkpoint.names()
            if file_name not in self._states
            and (name := state_of_file(file_name)) not in self._states
            and not self._has_ended(name)
        ]

    def restrict_to(self, states: Iterable[BaseState]) -> None:
        """Have these states alone, as at an earlier boundary."""
        self._states, self._every = {state.name: state for state in states}, None

    def end_epochs(self, num_epochs: int) -> None:
        """Forget the states that end with one of the first `num_epochs` epochs."""
        self._num_ended_epochs = num_epochs
        for name in [name for name in self._states if self._has_ended(name)]:
            del self._states[name]
        self._every = None

    def _has_ended(self, name: str) -> bool:
        epoch = epoch_of(name)
        return epoch is not None and epoch < self._num_ended_epochs


@contextmanager
def _explaining(state: BaseState, path: Place) -> Iterator[None]:
    """Have what is raised within name the file; a state's own errors, what to do."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except (ElasticRunError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} could not be loaded as the state {state.name!r} of this program: "
            f"{text_of(error)}\nThe file is intact, so something else was saved under "
            "that name. Give the state another name, or start anew with another "
            "checkpoint directory."
        ) from error


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
        "was when it was saved; or give it another name, and it begins anew; or start "
        "anew with another checkpoint directory."
    )


def hint_of_renaming(
    checkpoint: Checkpoint, *, not_found: Iterable[str], unclaimed: Iterable[str]
) -> str | None:
    """Return a warning that a state may have been renamed; None if none was.

    A state that the checkpoint lacks may simply be new, and one of its that nothing has
    asked for may be made in a later phase. Only where there are both may it be one
    state under two names, whose values were then not loaded.

    Args:
        not_found: The names of states that it did not have.
        unclaimed: Its files that no state has claimed.
    """
    new = _names(not_found)
    left = _names(map(state_of_file, unclaimed))
    if not (new and left):
        return None
    return (
        f"{checkpoint.path} has nothing for {new}, which was therefore not loaded, and "
        f"nothing has loaded its {left} yet. Was a state renamed? Then its values were "
        "not loaded: stop the job, give the state its old name, remove the checkpoints "
        "newer than that one, and start again. If not, ignore this: what is not loaded "
        "is kept."
    )


def _names(names: Iterable[str]) -> str:
    found = sorted({name for name in names if not _OWN.fullmatch(name)})
    return ", ".join(map(repr, found))


def _number(value: Any) -> float | None:
    """Return a value as a finite number, None if it is none."""
    try:
        number = float(value)
    except Exception:  # Of whatever a program keeps there.
        return None
    return number if math.isfinite(number) else None
