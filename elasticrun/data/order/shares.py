"""What a replica reads of each global batch of a loop, and in which micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elasticrun.data.order.batches import Batches
from elasticrun.data.order.partition import Shares
from elasticrun.data.order.together import Together
from elasticrun.job.loop import Part

_PADDING = range(1)  # The batch's first sample stands in for a missing one.


class Share(NamedTuple):
    """One of this replica's micro-batches.

    Attributes:
        places: Where its samples are, counted from the start of the global batch.
    """

    places: Sequence[int]
    part: Part


class LoopShares(Protocol):
    """What this replica reads of each global batch of a loop."""

    def of_batch(self, number: int) -> list[Share]:
        """Return its micro-batches of a global batch, at least one.

        A single one without places stands for a batch of which it reads nothing.
        """
        ...

    def num_alike(self, number: int) -> int:
        """Return how many batches are shared out alike, this one the first.

        At least 1; fewer than there are cost time only.
        """
        ...


@dataclass(frozen=True)
class EvenShares:
    """Runs of neighbours whose lengths differ by at most one.

    Attributes:
        batches: The global batches of the loop.
        shares: How each of them is shared out.
        together: The loaders that deliver in the same steps, if there are any: batch k
            is then delivered in step k.
    """

    batches: Batches
    shares: Shares
    together: Together | None = None

    def of_batch(self, number: int) -> list[Share]:
        size = self.batches.size(number)
        advance = self.batches.start(number + 1) - self.batches.start(number)
        if self.together is None:
            num_micro = self.shares.num_micro(size)
        else:
            num_micro = self.together.num_micro(number)
        runs = self.shares.micro_batches(size, num_micro)
        if not runs:
            return [Share((), Part(0, 0, 0, size, True, 0, advance, 0.0))]
        local_size = sum(map(len, runs))
        return [
            Share(
                run or _PADDING,
                Part(
                    micro=micro,
                    num_valid=len(run),
                    local_batch_size=local_size,
                    global_batch_size=size,
                    is_step=micro == len(runs) - 1,
                    num_read=len(run) or 1,
                    advance=advance,
                    weight=len(run) * self.shares.world_size / size,
                ),
            )
            for micro, run in enumerate(runs)
        ]

    def num_alike(self, number: int) -> int:
        count = self.batches.num_alike(number)
        if self.together is None:
            return count
        return min(count, self.together.num_alike(number))
