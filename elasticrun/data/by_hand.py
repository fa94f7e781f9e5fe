"""Loops that a program runs with `iter` and `next` instead of `for`."""

from __future__ import annotations

import sys
from typing import NamedTuple

from elasticrun.checkpoint.position import Position
from elasticrun.job.progress import Progress


class PassesByHand(NamedTuple):
    """Passes in a row, each begun by hand when the one before had ended.

    Attributes:
        epoch: The epochs that were finished.
        in_epoch: Whether they are in an epoch.
        first: The number of the first one's loop.
        last: That of the last one's.
    """

    epoch: int
    in_epoch: bool
    first: int
    last: int

    def skip(self, progress: Progress) -> None:
        """Walk past the passes that are over, if a replay comes to the first one.

        As in `except StopIteration: batches = iter(loader)`: a program that begins the
        next pass because one has ended takes that pass's first batch at once. If each
        finished pass were skipped by itself, that would raise StopIteration once more,
        where nothing catches it. So all are passed before the first one begins.
        """
        first = (self.epoch, self.first, self.in_epoch)
        if progress.is_replaying and progress.place == first:
            progress.pass_loops(self.last)


def run_with(run: PassesByHand | None, position: Position) -> PassesByHand:
    """Return the passes of which the one that begins at a position is the last."""
    epoch, loop, in_epoch = position.place
    new = PassesByHand(epoch, in_epoch, loop, loop)
    if run is None or run[:2] != new[:2]:
        return new
    # One follows the other if the program has just been told that that is over.
    follows = sys.exc_info()[0] is StopIteration or run.last == loop
    return run._replace(last=loop) if follows else new
