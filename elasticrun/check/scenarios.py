"""Scenarios: where a run is restarted, and what each of its generations is to do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_TEXT = re.compile(
    r"(?P<after>after)?(?P<epoch>\d+):(?:(?P<loop>\d+):(?P<batch>\d+)|end)"
)
_EDGES = (0, -2, -1)  # The first boundary of a loop, the last but one and the last.
_MOST_LOOPS = 2  # Of the first epoch, and outside of epochs.


class RestartPlace(NamedTuple):
    """The boundary after a batch, or after an epoch.

    Attributes:
        epoch: The epoch's number; outside of epochs, how many are finished.
        loop: The loop's number since the last epoch ended; -1 for the epoch's end.
        batch: How many global batches of the loop are finished.
        in_epoch: Whether the loop stands in an epoch.
    """

    epoch: int
    loop: int
    batch: int
    in_epoch: bool = True

    def at(self, batch: int) -> RestartPlace:
        """Return the boundary after another batch of the same loop."""
        return self._replace(batch=batch)

    @property
    def is_end(self) -> bool:
        return self.loop < 0

    def __str__(self) -> str:
        if self.is_end:
            return f"{self.epoch}:end"
        prefix = "" if self.in_epoch else "after"
        return f"{prefix}{self.epoch}:{self.loop}:{self.batch}"

    def describe(self) -> str:
        if self.is_end:
            return f"the end of epoch {self.epoch}"
        where = f"loop {self.loop}, batch {self.batch}"
        if self.in_epoch:
            return f"epoch {self.epoch}, {where}"
        return f"{where} after {self.epoch} epochs"


def parse_restart_place(text: str) -> RestartPlace:
    """Return the place that E:L:K, E:end or afterE:L:K means."""
    match = _TEXT.fullmatch(text)
    if match is None or (match["after"] and match["loop"] is None):
        raise ValueError(
            f"--at {text}: give EPOCH:LOOP:BATCH (0:1:3 is after the third batch of "
            "the second loop of the first epoch), EPOCH:end, or "
            "afterEPOCHS:LOOP:BATCH for a loop outside of epochs."
        )
    if match["loop"] is None:
        return RestartPlace(int(match["epoch"]), -1, 0)
    place = RestartPlace(
        int(match["epoch"]), int(match["loop"]), int(match["batch"]), not match["after"]
    )
    if place.batch < 1:
        raise ValueError(
            f"--at {text}: batches are counted from 1 here, since a job can stop after "
            "a batch but not before the first one."
        )
    return place


class Scenario(NamedTuple):
    """The generations of a run, in their order, and how each ends.

    Attributes:
        sizes: The number of replicas of each generation.
        places: Where it is restarted: where each generation ends, but for the last one.
        is_killed: Whether they are killed there, after a checkpoint, and not stopped.
        is_float64: Whether the program computes in double precision.
    """

    sizes: tuple[int, ...]
    places: tuple[RestartPlace, ...] = ()
    is_killed: bool = False
    is_float64: bool = False

    @property
    def is_resized(self) -> bool:
        """Whether not all generations have the same number of replicas."""
        return len(set(self.sizes)) > 1

    def is_resized_in(self, generation: int, size: int) -> bool:
        """Return whether other replicas than so many have run up to a generation."""
        return any(each != size for each in self.sizes[: generation + 1])

    def end_of(self, generation: int) -> RestartPlace | None:
        """Return where a generation ends; None for the end of the program."""
        return self.places[generation] if generation < len(self.places) else None

    def until_generation(self, generation: int) -> Scenario:
        """Return the scenario that is the same up to a generation, in which it ends."""
        return self._replace(
            sizes=self.sizes[: generation + 1], places=self.places[:generation]
        )

    def describe(self) -> str:
        if not self.places:
            return f"without a restart, {replicas_in_words(self.sizes[0])}"
        what = "killed after a checkpoint at" if self.is_killed else "restarted at"
        where = ", then at ".join(place.describe() for place in self.places)
        if self.is_resized:
            sizes = " to ".join(map(str, self.sizes))
            return f"{what} {where}, from {sizes} replicas"
        return f"{what} {where}, {replicas_in_words(self.sizes[0])}"

    def options(self) -> list[str]:
        """Return what makes `elasticrun check` run this scenario."""
        options = [part for place in self.places for part in ("--at", str(place))]
        sizes = self.sizes if self.is_resized else self.sizes[:1]
        options += ["--replicas", ",".join(map(str, sizes))]
        return options + ["--kill"] * self.is_killed


def replicas_in_words(size: int) -> str:
    """Return a number of replicas in words."""
    return f"{size} replica{'s' * (size > 1)}"


def places_to_try(boundaries: Sequence[RestartPlace]) -> list[RestartPlace]:
    """Return the boundaries where mistakes show, in their order.

    The first batch of a loop, the last but one and the last, each of another loop if
    there are as many: of two in the first epoch, of one in the last, of some outside of
    epochs. And the ends of the first and the last epoch.
    """
    loops: dict[RestartPlace, list[RestartPlace]] = {}
    for place in boundaries:
        loops.setdefault(place.at(0), []).append(place)
    ends = [loop for loop in loops if loop.is_end]
    inside = [loop for loop in loops if loop.in_epoch and not loop.is_end]
    first = [loop for loop in inside if loop.epoch == inside[0].epoch]
    outside = [loop for loop in loops if not loop.in_epoch]
    some = first[:_MOST_LOOPS] + inside[-1:] + outside[:_MOST_LOOPS]
    chosen = list(dict.fromkeys(some))
    tried = {*ends[:1], *ends[-1:]}
    num_edges = max(len(chosen), len(_EDGES)) if chosen else 0
    for number, loop in enumerate(itertools.islice(itertools.cycle(chosen), num_edges)):
        edge = _EDGES[number % len(_EDGES)]
        tried.add(loops[loop][max(edge, -len(loops[loop]))])
    return [place for place in boundaries if place in tried]


def spread(boundaries: Sequence[RestartPlace], count: int) -> list[RestartPlace]:
    """Return so many boundaries, or all, evenly spread over the whole training."""
    return [
        boundaries[(number + 1) * len(boundaries) // (count + 1)]
        for number in range(min(count, len(boundaries)))
    ]


@dataclass(frozen=True)
class Limits:
    """How much of a script is run; 0 for all of it."""

    max_epochs: int = 3
    max_batches: int = 4

    def samples(self, num_samples: int, batch_size: int) -> int:
        """Return how many samples a loop delivers.

        The last batch keeps its size: that one is often short, and then special.
        """
        if not self.max_batches or num_samples <= self.max_batches * batch_size:
            return num_samples
        rest = num_samples % batch_size or batch_size
        return (self.max_batches - 1) * batch_size + rest


@dataclass(frozen=True)
class Plan:
    """What one generation of a checked run is to do.

    Attributes:
        directory: The scratch copy to run in.
        guarded: Folders in which nothing may be written, whatever is around them.
        writable: Folders in which the program may write.
        records: Where what is seen is noted.
        checkpoints: Where the job keeps its checkpoints, whatever the program says.
        generation: The number of this generation in its run, from 0.
        until: Where it stops; None to run to the end.
        is_killed: Whether it saves there, and is killed a boundary later.
        is_float64: Whether the program computes in double precision.
        watched: Fields, files and variables of which the lines are sought that
            change them.
        home: What `directory` is a copy of.
    """

    directory: str
    guarded: tuple[str, ...]
    writable: tuple[str, ...]
    records: str
    checkpoints: str
    generation: int
    limits: Limits = Limits()
    until: RestartPlace | None = None
    is_killed: bool = False
    is_float64: bool = False
    watched: tuple[str, ...] = ()
    home: str = ""


def decode_plan(values: Mapping[str, Any]) -> Plan:
    """Return the plan that has these values, which JSON has carried."""
    until = None if values["until"] is None else RestartPlace(*values["until"])
    lists = {name: tuple(values[name]) for name in ("guarded", "writable", "watched")}
    limits = Limits(**values["limits"])
    return Plan(**{**values, **lists, "until": until, "limits": limits})
