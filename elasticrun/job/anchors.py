"""What a program sees of states where an epoch begins, and where a loop has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO

from elasticrun.checkpoint.states.expected import COUNT, MAPPING, check_values
from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.checkpoint.states.noted import Noted, Place, exact
from elasticrun.checkpoint.states.remembered import form_of, without
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.logger import Logger

logger = Logger(__name__)

_SAVED: Place = (0, 0, False)  # Wherever that was.


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
        self.noted = {zone: Noted() for zone in (True, False, None)}
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
