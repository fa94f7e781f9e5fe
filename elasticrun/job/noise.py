"""The noise of a model's gradients, as its steps have measured it: kept, added up."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from torch import Tensor

from elasticrun.adaptive.noise import (
    MeasuredStep,
    Noise,
    measure_step,
    summarize_newest,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.job.current import current_job
from elasticrun.replicas.gathering import gather

_MOST_STEPS = 512  # That are kept.


class StepPart(NamedTuple):
    """One replica's part in what a step tells; numbers may still be computed.

    Attributes:
        chunk_squares: As of `measure_step`, of its own chunks.
        num_chunks: How many these are.
        total_square: The same on all replicas.
        batch_size: The same on all replicas.
    """

    chunk_squares: Tensor
    num_chunks: int
    total_square: Tensor
    batch_size: int


class NoiseRecord(BaseState):
    """What the newest measured steps tell, in every checkpoint.

    Replicas keep their parts of steps, which are added up in each save and when the
    program asks: a step communicates nothing for it.

    Attributes:
        progress: The steps with batches of the first size that the training is worth.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._steps: deque[MeasuredStep] = deque(maxlen=_MOST_STEPS)
        self._parts: deque[StepPart] = deque(maxlen=_MOST_STEPS)
        self.progress = 0.0

    @property
    def noise(self) -> Noise:
        """The noise, as of the newer half of the steps whose parts were added up."""
        return summarize_newest(list(self._steps))

    def add(self, part: StepPart) -> None:
        """Keep this replica's part of a step. All replicas measure the same steps."""
        self._parts.append(part)

    def sum_parts(self) -> None:
        """Add up the parts of all replicas. Collective."""
        own = [
            (float(part.chunk_squares), part.num_chunks, float(part.total_square))
            for part in self._parts
        ]
        gathered = gather(own, before_reading=current_job().wait_for_gpu)
        for *of_replicas, part in zip(*gathered, self._parts, strict=True):
            squares, chunks, totals = zip(*of_replicas, strict=True)
            step = measure_step(
                chunk_squares=math.fsum(squares),
                total_square=totals[0],
                batch_size=part.batch_size,
                num_chunks=sum(chunks),
            )
            if step is not None:
                self._steps.append(step)
        self._parts.clear()

    def sync(self) -> None:
        self.sum_parts()

    def remember(self) -> Callable[[], None]:
        """Remember it without parts: a rescue knows the noise from fewer steps."""
        steps, progress = tuple(self._steps), self.progress

        def put_back() -> None:
            self._steps = deque(steps, maxlen=_MOST_STEPS)
            self._parts.clear()
            self.progress = progress

        return put_back

    def save(self, fileobj: BinaryIO) -> None:
        values = {"steps": list(self._steps), "progress": self.progress}
        fileobj.write(json.dumps(values).encode())

    def load(self, fileobj: BinaryIO) -> None:
        values = json.loads(fileobj.read())
        self._steps.extend(MeasuredStep(*step) for step in values["steps"])
        self.progress = float(values["progress"])
