"""Routes: which generations a run consists of, and where each one ends."""

from __future__ import annotations

from typing import NamedTuple

from elasticrun.check.runs.places import RestartPlace


class Route(NamedTuple):
    """The generations of a run, in their order; each is called a leg.

    Attributes:
        sizes: The number of replicas of each leg.
        places: Where it is restarted: where each leg ends, but for the last one.
        is_killed: Whether they are killed there, after a checkpoint, and not stopped.
        is_float64: Whether the program computes in double precision.
    """

    sizes: tuple[int, ...]
    places: tuple[RestartPlace, ...] = ()
    is_killed: bool = False
    is_float64: bool = False

    @property
    def is_resized(self) -> bool:
        """Whether not all legs have the same number of replicas."""
        return len(set(self.sizes)) > 1

    def end_of(self, leg: int) -> RestartPlace | None:
        """Return where a leg ends; None for the end of the program."""
        return self.places[leg] if leg < len(self.places) else None

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
        """Return what makes `elasticrun check` take this route."""
        options = [part for place in self.places for part in ("--at", str(place))]
        sizes = self.sizes if self.is_resized else self.sizes[:1]
        options += ["--replicas", ",".join(map(str, sizes))]
        options += ["--kill"] * self.is_killed
        return options + ["--float64"] * self.is_float64


def straight(size: int, *, is_float64: bool = False) -> Route:
    """Return the route without a restart."""
    return Route((size,), is_float64=is_float64)


def replicas_in_words(size: int) -> str:
    """Return a number of replicas in words."""
    return f"{size} replica{'s' * (size > 1)}"
