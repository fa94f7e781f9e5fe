"""What a program sees of states where an epoch begins, and where a loop has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import BinaryIO

from elasticrun.checkpoint.states.expected import COUNT, MAPPING, check_values
from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.checkpoint.states.noted import Noted, Place
from elasticrun.checkpoint.states.remembered import form_of
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.logger import Logger

logger = Logger(__name__)


class Anchors(BaseState):
    """The small values of all shared states at places that a replay comes through.

    Attributes:
        noted: Those of the running epoch (True), and outside of epochs (False).
        num_saves: How many saves the program has asked for since the last place, or
            had when the checkpoint was written.
    """

    def __init__(self) -> None:
        super().__init__("replay-anchors")
        self.noted = {in_epoch: Noted() for in_epoch in (True, False)}
        self.num_saves = 0
        self._has_said = False

    def add(self, place: Place, states: Iterable[BaseState]) -> None:
        """Note what states are at a place."""
        noted, self.num_saves = self.noted[place[2]], 0
        if noted.is_over:
            return
        forms = {
            state.name: form_of(current)
            for state in states
            if not state.is_per_replica
            and not find_metrics(state.target)  # Each replica has its own part.
            and (current := state.current()) is not None
        }
        noted.add(place, forms)
        if noted.is_over and not self._has_said:
            self._has_said = True
            logger.info(
                "an epoch has over 1,000 loops, or states have over 16 MB of small "
                "values: what they were between loops is not noted, so code there that "
                "is replayed sees them as the checkpoint has them; above 1,000 loops "
                "it also draws anew"
            )

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
        encoded = {key: each.encode() for key, each in self.noted.items()}
        return partial(save_values, {**encoded, "num_saves": self.num_saves}), True

    def load(self, fileobj: BinaryIO) -> None:
        values = load_values(fileobj)
        check_values(values, MAPPING, name=self.name)
        for in_epoch, noted in self.noted.items():
            noted.decode(values.get(in_epoch, ()), name=self.name)
        check_values(values.get("num_saves", 0), COUNT, name=f"{self.name}.num_saves")
        self.num_saves = values.get("num_saves", 0)
