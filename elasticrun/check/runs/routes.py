"""Routes: which generations a run consists of, and where each one ends."""

from __future__ import annotations

from typing import NamedTuple

from elasticrun.check.runs.places import RestartPlace
from elasticrun.check.runs.plan import KILL, STOP


class Leg(NamedTuple):
    """One generation of a run.

    Attributes:
        size: How many replicas it has.
        until: Where it ends; None for the end of the program.
        ending: "stop", or "kill".
    """

    size: int
    until: RestartPlace | None = None
    ending: str = STOP


class Route(NamedTuple):
    """The generations of a run, in their order."""

    legs: tuple[Leg, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of replicas of each generation."""
        return tuple(leg.size for leg in self.legs)

    @property
    def is_resized(self) -> bool:
        """Whether not all generations have the same number of replicas."""
        return len(set(self.sizes)) > 1

    @property
    def is_killed(self) -> bool:
        """Whether a generation is killed."""
        return any(leg.ending == KILL and leg.until for leg in self.legs)

    @property
    def places(self) -> tuple[RestartPlace, ...]:
        """Where it is restarted."""
        return tuple(leg.until for leg in self.legs if leg.until is not None)

    def describe(self) -> str:
        """Return the route in words."""
        if not self.places:
            return f"without a restart, {num_replicas(self.sizes[0])}"
        what = "killed after a checkpoint at" if self.is_killed else "restarted at"
        where = ", then at ".join(place.describe() for place in self.places)
        if self.is_resized:
            sizes = " to ".join(map(str, self.sizes))
            return f"{what} {where}, from {sizes} replicas"
        return f"{what} {where}, {num_replicas(self.sizes[0])}"

    def options(self) -> list[str]:
        """Return what makes `elasticrun check` take this route."""
        options = [part for place in self.places for part in ("--at", str(place))]
        sizes = self.sizes if self.is_resized else self.sizes[:1]
        options += ["--replicas", ",".join(map(str, sizes))]
        return options + ["--kill"] * self.is_killed


def straight(size: int) -> Route:
    """Return the route without a restart."""
    return Route((Leg(size),))


def through(
    places: tuple[RestartPlace, ...], sizes: tuple[int, ...], ending: str
) -> Route:
    """Return the route that is restarted at these places; sizes has one more."""
    stops = (*places, None)
    return Route(
        tuple(
            Leg(size, place, ending) for size, place in zip(sizes, stops, strict=True)
        )
    )


def num_replicas(size: int) -> str:
    """Return a number of replicas in words."""
    return f"{size} replica{'s' * (size > 1)}"
