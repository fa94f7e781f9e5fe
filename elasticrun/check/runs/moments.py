"""The moments that were recorded in a run, and the replays between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

VARIABLE_PREFIX = "variable:"  # Of a field that stands for a plain variable.
_RESUMING = ("continue", "enter", "begin", "exit")
_WORDS = {
    "begin": "the start of epoch {epoch}",
    "enter": "the start of loop {loop} of epoch {epoch}",
    "leave": "the end of loop {loop} of epoch {epoch}",
    "end": "the end of epoch {epoch}",
    "exit": "the end of the program",
}


class MomentKey(NamedTuple):
    """Identifies a moment of a program, with and without restarts."""

    kind: str
    epoch: int = -1
    loop: int = -1
    in_epoch: bool = True

    def describe(self) -> str:
        text = _WORDS[self.kind].format(epoch=self.epoch, loop=self.loop)
        return text if self.in_epoch else text.replace("of epoch", "after epochs up to")


class Moment(NamedTuple):
    """All recorded values at one point of the program.

    Attributes:
        fields: Every field of the registered states.
        files: The files that differ from the start of the run; None for gone ones.
    """

    key: MomentKey
    leg: int
    fields: dict[str, Any]
    random: dict[str, Any]
    files: dict[str, Any]
    variables: dict[str, Any]
    states: list[str]
    num_batches: int = 0


class LineChange(NamedTuple):
    """A line that changed a field."""

    field: str
    zone: str
    path: str
    line: int
    leg: int


def moments_of(notes: Iterable[dict[str, Any]]) -> list[Moment]:
    """Return the moments among what was noted."""
    return [
        Moment(
            MomentKey(
                **{name: note[name] for name in MomentKey._fields if name in note}
            ),
            **{name: note[name] for name in Moment._fields[1:] if name in note},
        )
        for note in notes
        if "fields" in note
    ]


def line_changes_of(notes: Iterable[dict[str, Any]]) -> list[LineChange]:
    """Return the lines among what was noted."""
    return [
        LineChange(*(note[name] for name in LineChange._fields))
        for note in notes
        if note["kind"] == "line"
    ]


def is_of_state(name: str, state: str) -> bool:
    """Return whether a field, or the length of one, is part of a state."""
    bare = name.removeprefix("len(").removesuffix(")")
    return bare == state or bare.startswith((f"{state}.", f"{state}["))


class Replay(NamedTuple):
    """What was run again between a stop and the place where the program went on.

    Attributes:
        stopped: What everything was at when the job stopped.
        steps: The moments of the replay, each with the zone that led to it; the last
            one is where the program went on.
    """

    stopped: Moment
    steps: list[tuple[str, Moment]]

    @property
    def resumed(self) -> Moment:
        """What everything was at when the program went on."""
        return self.steps[-1][1]


def replays_of(moments: list[Moment]) -> list[Replay]:
    """Return the replays of a run, one after each of its restarts."""
    found = []
    for stopped in (moment for moment in moments if moment.key.kind == "stop"):
        after = [moment for moment in moments if moment.leg == stopped.leg + 1]
        steps: list[tuple[str, Moment]] = []
        has_epoch = False
        previous = ""
        for moment in after:
            steps.append((_zone_before(moment.key, previous, has_epoch), moment))
            has_epoch = has_epoch or moment.key.kind in ("begin", "rebegin")
            previous = moment.key.kind
            if moment.key.kind in _RESUMING:
                break
        if steps:
            found.append(Replay(stopped, steps))
    return found


def _zone_before(key: MomentKey, previous: str, has_epoch: bool) -> str:
    """Return the zone whose code ran just before a moment."""
    if key.kind in ("start", "begin", "rebegin", "exit") or not key.in_epoch:
        return "D" if has_epoch else "P"
    return "A" if previous in ("begin", "rebegin") else "B"
