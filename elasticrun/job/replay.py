"""Restores registered states at the end of a replay."""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.remembered import Change, Remembered
from elasticrun.checkpoint.states.state import BaseState


class ReplayedStates:
    """Registered states as they were when the first loop began of a restarted program.

    What a program sets before that loop, such as a learning rate from its command line,
    is part of it, and stays. What it changes later, in code that is replayed, has been
    done before the checkpoint was written, and is undone.

    Args:
        states: Those that are registered, now and later.
    """

    def __init__(self, states: Registry) -> None:
        self._states = states
        self._before: dict[BaseState, Remembered] | None = None
        self._load: Callable[[BaseState], None] | None = None

    def begin(self, load: Callable[[BaseState], None] | None) -> None:
        """Remember all states, unless a replay is under way already.

        Args:
            load: Loads a state from the checkpoint that the program goes on from; None
                if there is none, so that large tensors stay as replayed code left them.
        """
        if self._before is None:
            self._before, self._load = {}, load
            for state in self._states:
                self.note(state)

    def note(self, state: BaseState) -> None:
        """Remember a state that is registered while code is replayed."""
        if self._before is not None and (values := state.current()) is not None:
            self._before[state] = Remembered(values)

    def put_back(self) -> None:
        """Undo what has changed since; before a save, too, which would keep it."""
        changed = []
        for state in self._states:
            before = (self._before or {}).get(state)
            if before is None:
                continue
            change = before.compare(state.current())
            if change is not Change.NOTHING:
                changed.append((state, before))
            if change is Change.MORE and self._load is not None:
                self._load(state)
        for state, before in changed:  # After all loads: one may change another state.
            state.put_back(before.put_back(state.current()))

    def end(self) -> None:
        """Forget what was remembered: the program has moved on."""
        self._before = None
