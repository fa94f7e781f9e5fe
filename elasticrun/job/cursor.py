"""Counters that go on from one loop to the next, through the whole job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from elasticrun.checkpoint.states.expected import (
    COUNT,
    FLAG,
    Kind,
    check_values,
)

# Where a loop stands: finished epochs and loops, and whether an epoch is running; of a
# loop inside another one's body also the outer index.
LoopKey = tuple[int, ...]

_PART = Kind("a number or a flag", lambda part: FLAG.fits(part) or COUNT.fits(part))
_EXPECTED = {"place": [_PART], "start": COUNT, "end": COUNT, "is_complete": FLAG}


class Cursor:
    """Counts over all loops of one kind, and knows where the one at a place began.

    A loop that comes again at its place, after a restart or after an exception, begins
    where it did before; one at another place begins where the last one ended. So what
    is saved needs no more than the last place, and is right in the middle of a loop as
    well as after it.
    """

    def __init__(self) -> None:
        self.place: LoopKey = ()
        self.start = 0
        self.end = 0
        self.is_complete = False
        self._outer: object = None

    def begin(self, place: LoopKey) -> int:
        """Begin a loop at a place of the program; return the index it starts at."""
        if place != self.place:
            self.place, self.start = place, self.end
        self.end = self.start
        self.is_complete = False
        return self.start

    def begin_inside(self, place: LoopKey, outer: object) -> int:
        """Begin a loop in the body of another one; return the index it starts at.

        Several in one body follow each other. In a body that runs again, after an
        exception, they start where they did before.

        Args:
            outer: The loop whose body it is, which is another object each time.
        """
        if place != self.place:
            self.place, self.start = place, self.end
        elif outer is not self._outer:
            self.end = self.start
        self._outer = outer
        return self.end

    def leave(self, end: int, *, is_complete: bool) -> None:
        """Leave the loop; the next one begins at `end`."""
        self.end = end
        self.is_complete = is_complete

    def remember(self) -> Callable[[], None]:
        """Return what puts it back to where it is now."""
        return partial(vars(self).update, dict(vars(self)))

    def encode(self) -> dict[str, Any]:
        """Return the cursor as plain values for a checkpoint."""
        return {
            "place": list(self.place),
            "start": self.start,
            "end": self.end,
            "is_complete": self.is_complete,
        }

    def decode(self, values: Any, *, resume: LoopKey) -> None:
        """Take what `encode` returned.

        Args:
            resume: The place and the index at which the job goes on: what a body that
                runs again has moved is moved back.
        """
        check_values(values, _EXPECTED, name="place of a loop")
        self.place = tuple(values["place"])
        self.start, self.end = values["start"], values["end"]
        self.is_complete = values["is_complete"]
        if self.place == resume:
            self.end = self.start
