"""Finds replicas that are no longer in step: one leaves out what all must do together.

Each counts what it does; nothing is communicated while that comes in time. A replica in
doubt asks the others' watchers, which answer also while their training threads wait in
a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from elasticrun.errors import ElasticRunError
from elasticrun.job.loop import LoaderInLoop
from elasticrun.replicas.agreement import Gate
from elasticrun.replicas.watcher import Watcher

_PATIENCE = timedelta(seconds=1)
_LONGEST_PAUSE = 0.05
_MOST_ALIKE = 8  # A program that leaves out passes on all replicas is not held up.


class InStep:
    """Counts what this replica has done, and compares it when in doubt.

    Attributes:
        num_passes: Forward passes that DDP expects a backward pass of.
        num_reductions: Backward passes in which DDP averaged gradients.
        num_counts: Sums of counts that `weigh` has asked for.
    """

    watcher: Watcher

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.num_passes = self.num_reductions = self.num_counts = 0
        self._num_batches = 0
        # At the last boundary.
        self._passes_there = self._reductions_there = 0
        self._num_alike: Counter[str] = Counter()  # By the loader.

    def counts(self) -> list[int]:
        """Return what others compare with theirs; from the watcher's thread.

        What a comparison takes for late is read last, since training goes on.
        """
        reductions = [self._reductions_there, self.num_reductions]
        return [*reductions, self._num_batches, self.num_counts]

    def finish_batch(self, loader: LoaderInLoop) -> None:
        """Count a global batch; nothing more unless its backward pass was left out."""
        self._num_batches += 1
        if self.num_passes != self._passes_there:
            if self.num_reductions == self._reductions_there:
                self._check_left_out(loader)
            self._passes_there = self.num_passes
        self._reductions_there = self.num_reductions

    def _check_left_out(self, loader: LoaderInLoop) -> None:
        """Wait until all others have left out the pass as well, or one has not."""
        if self._num_alike[loader.name] >= _MOST_ALIKE:
            return
        pause, batch = 0.001, self._num_batches
        is_alike = False
        while not is_alike:
            self._gate.check()
            self.watcher.ask()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            is_alike = True
            for rank, counts in self.watcher.reports().items():
                if counts is None:
                    is_alike = False
                    continue
                there, reductions, num_batches, _ = counts
                # On GPUs a backward pass does not hold its replica up.
                had = there if num_batches == batch else reductions
                if num_batches <= batch and had > self.num_reductions:
                    raise _left_out(loader, rank)
                is_alike &= num_batches >= batch
        self._num_alike[loader.name] += 1

    def await_count(self, work: Any, place: str) -> None:
        """Wait for a sum of counts.

        Args:
            place: Where the program has called `weigh`.
        """
        own = self.num_reductions, self._num_batches
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # What it comes to is raised below.
                work.wait(_PATIENCE)
            if work.is_completed():
                break
            self._gate.check()
            for rank, counts in self.watcher.reports().items():
                if counts is None:
                    continue
                _, reductions, num_batches, num_counts = counts
                is_further = reductions > own[0] or num_batches > own[1]
                if is_further and num_counts < self.num_counts:
                    raise _uncounted(place, rank)
            self.watcher.ask()
        work.wait()


def _left_out(loader: LoaderInLoop, rank: int) -> ElasticRunError:
    return ElasticRunError(
        f"a batch of the loop over `{loader.name}` ({loader.where}) had a forward pass "
        f"for training here, but no backward pass; on rank {rank} it had one. "
        "The gradients of different batches would be averaged, and the replicas wait "
        "for each other in the end. Leave a batch out on all replicas or on none: "
        "decide by a flag that is added up over them (dist.all_reduce), or call "
        "backward() on a loss of zero, "
        "`sum(p.sum() for p in model.parameters()) * 0`."
    )


def _uncounted(place: str, rank: int) -> ElasticRunError:
    return ElasticRunError(
        f"weigh(count=...) at {place} adds up the counts of all replicas, but rank "
        f"{rank} has begun its backward pass without it. Call it on every replica in "
        "each batch, with count=0 where there is nothing to count; of a mean take "
        "`sum / max(count, 1)`, since dividing by 0 gives NaN."
    )
