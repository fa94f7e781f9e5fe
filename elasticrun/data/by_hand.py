"""Passes that a program asks by hand: `iter`, `next`, and again once one is over."""

from __future__ import annotations

import sys
from typing import NamedTuple

from elasticrun.checkpoint.position import Position
from elasticrun.job.progress import Progress


class Run(NamedTuple):
    """Passes in a row that the program asked by hand, each when one had ended.

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

        It would be told as often as before that a pass is over; but who has just been
        told so, and asks for the next pass, cannot be told again.
        """
        first = (self.epoch, self.first, self.in_epoch)
        if progress.is_replaying and progress.place == first:
            progress.pass_loops(self.last)


def run_with(run: Run | None, position: Position) -> Run:
    """Return the passes of which the one that begins at a position is the last.

    Args:
        run: Those that were asked by hand before, if the last loop was one of them.
    """
    epoch, loop, in_epoch = position.place
    new = Run(epoch, in_epoch, loop, loop)
    if run is None or run[:2] != new[:2]:
        return new
    # One follows the other if the program has just been told that that is over.
    follows = sys.exc_info()[0] is StopIteration or run.last == loop
    return run._replace(last=loop) if follows else new
