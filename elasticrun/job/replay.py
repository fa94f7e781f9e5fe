"""Shows replayed code what the first run saw, and restores states where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO

from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.anchor_notes import AnchorNotes, Place, exact
from elasticrun.checkpoint.states.expected import COUNT, MAPPING, check_values
from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.checkpoint.states.remembered import (
    Change,
    RememberedValues,
    form_of,
    is_whole,
    without,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import is_torchs
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.errors import CheckpointError, text_of
from elasticrun.logger import Logger

logger = Logger(__name__)

_SAVED: Place = (0, 0, False)  # Wherever that was.


class ReplayedStates:
    """Registered states as they were when the first loop began of a restarted program.

    What a program sets before that loop, such as a learning rate from its command line,
    is part of it, and stays. What it changes later, in code that is replayed, has been
    done before the checkpoint was written, and is undone.

    Before that, replayed code sees small values as they were: those that `Anchors` has
    of the places that the program comes through.

    Args:
        states: Those that are registered, now and later.

    Attributes:
        num_saves: How many saves replayed code has asked for since the last anchor.
    """

    def __init__(self, states: Registry) -> None:
        self._states = states
        self.anchors = Anchors(states)
        self.num_saves = 0
        self._seen: dict[str, Any] = {}  # At the last anchor that was passed.
        self._before: dict[BaseState, RememberedValues] | None = None
        self._load: Callable[[BaseState], None] | None = None

    def begin(self, load: Callable[[BaseState], None] | None) -> None:
        """Remember all states, unless a replay is under way already.

        Args:
            load: Loads a state from the checkpoint that the program goes on from; None
                if there is none, so that large tensors stay as replayed code left them.
        """
        if not self.is_under_way:
            self._before, self._load, self._seen = {}, load, {}
            for state in self._states:
                self.remember(state)

    @property
    def is_under_way(self) -> bool:
        """Whether code behind the first loop is replayed."""
        return self._before is not None

    @property
    def is_guided(self) -> bool:
        """Whether the code that is replayed is that which the anchors are of."""
        return self.is_under_way and self._load is not None

    def pass_anchor(self, place: Place) -> None:
        """Let replayed code see what the first run saw from a place on."""
        if self.is_guided and (seen := self.anchors.noted[place[2]].at(place)):
            self._seen = seen
            for state in self._states:
                self._show(state)

    def _show(self, state: BaseState) -> None:
        """Put small values back as they were at the last anchor."""
        if state.name not in self._seen or (values := state.current()) is None:
            return
        form, target = self._seen[state.name], state.target
        if target is not None and not (is_torchs(target) or is_whole(form)):
            return  # Parts of two moments may be nothing that it could load.
        is_free = not is_torchs(target)  # Whose entries have one kind each.
        found = RememberedValues.of_form(form).put_back(values, is_free=is_free)
        shown, now = (form_of(each) for each in (found, state.current()))
        if type(found) is type(values) and exact(shown) != exact(now):
            try:
                state.put_back(found)  # It had returned copies.
            except Exception as error:
                raise CheckpointError(
                    f"what {self.anchors.name!r} has of {state.name!r} does not fit "
                    f"this program: {text_of(error)}"
                ) from error

    def remember(self, state: BaseState) -> None:
        """Remember a state that is registered while code is replayed."""
        if self._before is not None and (values := state.current()) is not None:
            self._before[state] = RememberedValues(values)
            if self.is_guided:
                self.anchors.leave_out(state.name, form_of(values))
                self._show(state)

    def put_back(self) -> None:
        """Undo what has changed since."""
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
        self._before, self._seen, self.anchors.is_replaying = None, {}, False


class Anchors(BaseState):
    """The small values of all shared states at places that a replay comes through.

    Args:
        states: Those that are registered, now and later.

    Attributes:
        noted: Those of the running epoch (True), outside of epochs (False), and at the
            last save (None).
        num_saves: How many saves the program has asked for since the last place, or
            had when the checkpoint was written.
        is_replaying: Whether the program has yet to come to where that was.
    """

    def __init__(self, states: Iterable[BaseState]) -> None:
        super().__init__("replay-anchors")
        self._states = states
        self.noted = {zone: AnchorNotes() for zone in (True, False, None)}
        self.num_saves = 0
        self.is_replaying = False
        self._has_said = False

    def add(self, place: Place) -> None:
        """Note what states are at a place."""
        noted, self.num_saves = self.noted[place[2]], 0
        if noted.is_over:
            return
        noted.add(place, self._forms())
        if noted.is_over and not self._has_said:
            self._has_said = True
            logger.info(
                "an epoch has over 1,000 loops, or states have over 16 MB of small "
                "values: what they were between loops is not noted, so code there that "
                "is replayed sees them as the checkpoint has them; above 1,000 loops "
                "it also draws anew"
            )

    def _forms(self) -> dict[str, Any]:
        now = {
            state.name: current
            for state in self._states
            if not state.is_per_replica
            and not find_metrics(state.target)  # Each replica has its own part.
            and (current := state.current()) is not None
        }
        forms: dict[str, Any] = form_of(now)[1]  # All together, for GPUs.
        return forms

    def leave_out(self, name: str, now: Any) -> None:
        """Forget what a state has otherwise than it had at the save.

        That was set on purpose, or `load` does not set it, as a rank or a device, which
        is another one in each process.

        Args:
            now: Its form before the first loop.
        """
        saved = self.noted[None].at(_SAVED).get(name)
        if saved is not None and exact(saved) != exact(now):
            for noted in self.noted.values():
                noted.change(name, lambda form: without(form, saved, now))

    def remember(self) -> Callable[[], None]:
        back = [noted.remember() for noted in self.noted.values()]
        num_saves = self.num_saves

        def put_back() -> None:
            self.num_saves = num_saves
            for each in back:
                each()

        return put_back

    def save(self, fileobj: BinaryIO) -> None:
        self.begin_save()[0](fileobj)

    def begin_save(self) -> tuple[Callable[[BinaryIO], object], bool]:
        if not self.is_replaying:
            self.noted[None].clear()
            self.noted[None].add(_SAVED, self._forms())
        encoded = {key: each.encode() for key, each in self.noted.items()}
        return partial(save_values, {**encoded, "num_saves": self.num_saves}), True

    def load(self, fileobj: BinaryIO) -> None:
        values = load_values(fileobj)
        check_values(values, MAPPING, name=self.name)
        for zone, noted in self.noted.items():
            noted.decode(values.get(zone, ()), name=self.name)
        check_values(values.get("num_saves", 0), COUNT, name=f"{self.name}.num_saves")
        self.num_saves, self.is_replaying = values.get("num_saves", 0), True
