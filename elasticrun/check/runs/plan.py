"""What a check tells the replicas of one generation to do and to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elasticrun.check.runs.scenarios import RestartPlace


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
        leg: The number of this generation in its run, from 0.
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
    leg: int
    limits: Limits = Limits()
    until: RestartPlace | None = None
    is_killed: bool = False
    is_float64: bool = False
    watched: tuple[str, ...] = ()
    home: str = ""

    def encode(self) -> dict[str, Any]:
        return asdict(self)


def decode_plan(values: Mapping[str, Any]) -> Plan:
    """Return the plan that `encode` made these values from."""
    until = None if values["until"] is None else RestartPlace(*values["until"])
    lists = {name: tuple(values[name]) for name in ("guarded", "writable", "watched")}
    limits = Limits(**values["limits"])
    return Plan(**{**values, **lists, "until": until, "limits": limits})
