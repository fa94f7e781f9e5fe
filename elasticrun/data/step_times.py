"""How long a loader's steps take: medians, saved with the loader."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter
from typing import Any

from elasticrun.adaptive.step_time import TimedSteps
from elasticrun.checkpoint.states.expected import STEP_TIMES, check_values
from elasticrun.job.job import Job
from elasticrun.job.loop import LoopStart, MicroBatchInfo

_FEWEST_TIMES = 10  # Of steps of one kind, so that their median is one of all.
_MOST_TIMES = 64
_MOST_KINDS = 64  # That are kept, the newest ones.

Kind = tuple[int, int, float, int]  # As the first four of `TimedSteps`.


class StepTimes:
    """How long steps take, at these and at earlier numbers of replicas.

    Attributes:
        batch_size: Samples in the last batch that was timed; 0 before any.
        max_local_batch_size: Of the loader.
        max_batch_size: Up to which the job decides the size; None if it does not.
        min_efficiency: Below which it decides for no size.
    """

    def __init__(self, job: Job, max_local_batch_size: int | None) -> None:
        self._job = job
        self._num_replicas = job.world_size
        self.num_nodes = -(-job.world_size // job.environment.local_world_size)
        self.batch_size = 0
        self.max_local_batch_size = max_local_batch_size
        self.max_batch_size: int | None = None
        self.min_efficiency = 0.0
        self._times: dict[Kind, deque[float]] = {}
        self._known: dict[Kind, float] = {}  # From earlier generations.
        # When the last body ended, how many steps there were, and how it was cut.
        self._ended, self._num_steps = 0.0, 0
        self._like: tuple[LoopStart, int, int] | None = None

    def end_step(self, start: LoopStart, part: MicroBatchInfo) -> None:
        """Note how long a step took, of whose global batch this is the last part.

        From the end of the body before to the end of its own. Timed is what is trained
        with, and is cut like the batch before it in the loop. So neither a shorter last
        one is, nor one that is cut in two to measure its noise.

        Args:
            start: Of the loop.
        """
        now, num_steps = perf_counter(), self._job.num_steps
        _, size, num_micro = like = start, part.global_batch_size, part.micro + 1
        if like == self._like and num_steps != self._num_steps:
            replicas = self._num_replicas
            local = -(-size // replicas) / num_micro
            kind = self.num_nodes, replicas, local, num_micro
            times = self._times.setdefault(kind, deque(maxlen=_MOST_TIMES))
            times.append(now - self._ended)
            self.batch_size = size
        self._ended, self._num_steps, self._like = now, num_steps, like

    @property
    def steps(self) -> list[TimedSteps]:
        """How long steps of each kind take.

        A save, or an evaluation in the loop's body, makes a few of them longer.
        """
        medians = {
            kind: statistics.median(times)
            for kind, times in self._times.items()
            if len(times) >= _FEWEST_TIMES
        }
        known = {k: known for k, known in self._known.items() if k not in medians}
        return [TimedSteps(*k, seconds) for k, seconds in {**known, **medians}.items()]

    def encode(self) -> dict[str, Any]:
        """Return them as plain values; empty before there are any."""
        steps = self.steps[-_MOST_KINDS:]
        if not steps:
            return {}
        return {
            "batch_size": self.batch_size,
            "max_local_batch_size": self.max_local_batch_size,
            "max_batch_size": self.max_batch_size,
            "min_efficiency": self.min_efficiency,
            "steps": steps,
        }

    def decode(self, values: Any) -> None:
        """Take what was known of the loader's steps before."""
        for key in ("batch_size", "steps"):  # The rest is the program's.
            check_values(values[key], STEP_TIMES[key], name=f"step_times.{key}")
        self.batch_size = values["batch_size"]
        steps = [TimedSteps(*step) for step in values["steps"]]
        self._known = {step[:4]: step.seconds for step in steps}
