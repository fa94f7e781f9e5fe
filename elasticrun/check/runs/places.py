"""Places in a training where a check restarts it, and how people write them."""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(
    r"(?P<after>after)?(?P<epoch>\d+):(?:(?P<loop>\d+):(?P<batch>\d+)|end)"
)


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
    """Return the place that E:L:K, E:end or afterE:L:K means.

    Raises:
        ValueError: `text` is none of them.
    """
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


class LoopPlace(NamedTuple):
    """One loop of the baseline, and how many global batches it has."""

    epoch: int
    loop: int
    in_epoch: bool
    num_batches: int

    def at(self, batch: int) -> RestartPlace:
        """Return the boundary after a batch of it."""
        return RestartPlace(self.epoch, self.loop, batch, self.in_epoch)
